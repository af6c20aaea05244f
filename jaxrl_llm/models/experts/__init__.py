"""Mixtures of experts. In: hidden states, perhaps the experts to use. Out: hidden states and a `Routing`. Experts
run in blocks on a CPU, by grouped matmul kernels on TPU and GPU, or spread over devices."""
