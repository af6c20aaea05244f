"""Flags of XLA and libtpu for the accelerators of this machine: most let collectives go on beside the computation.

On a CPU there are none. A flag that the user has set, in XLA_FLAGS or LIBTPU_INIT_ARGS, stays as it is. An unknown one
would end the process, so that tests/config/test_flags.py asks the installed XLA and libtpu for each.
"""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

# {platform: (variable that carries them, {flag: value})}. Sources: the sets of AI-Hypercomputer/maxtext
# (benchmarks/xla_flags_library.py) for all-gathers, all-reduces and data parallelism over slices; NVIDIA's page "Tips
# for High-Performance LLMs with JAX and XLA".
_FLAGS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "tpu": (
        "LIBTPU_INIT_ARGS",
        {
            "xla_enable_async_all_gather": "true",
            # or a gather over several axes of a torus becomes an all-reduce of zeros and the own slice: twice the bytes
            "xla_tpu_prefer_async_allgather_to_allreduce": "true",
            # The SparseCores carry these beside the computation, over all links of a torus; without the flags they go
            # along a ring, and a sum that is scattered over a whole slice is summed everywhere. (Fusions that let
            # gathers go on as well are refused by libtpu 0.0.50 on all chips but v5e.)
            "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
            "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
            "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
            "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
            "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true",
            # or a product with a gathered weight becomes a ring of permutes, over one link where a gather has two
            "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
            "xla_enable_async_all_reduce": "true",
            "xla_tpu_overlap_compute_collective_tc": "true",
            "xla_tpu_enable_data_parallel_all_reduce_opt": "true",
            "xla_tpu_data_parallel_opt_different_sized_ops": "true",
        },
    ),
    "gpu": (
        "XLA_FLAGS",
        {
            "xla_gpu_enable_latency_hiding_scheduler": "true",
            "xla_gpu_enable_pipelined_all_gather": "true",
            "xla_gpu_enable_pipelined_all_reduce": "true",
            "xla_gpu_enable_pipelined_reduce_scatter": "true",
        },
    ),
}


def added(platform: str, environment: Mapping[str, str]) -> dict[str, str]:
    """{variable: the flags that it lacks} for "tpu" or "gpu", nothing for others or under JAXRL_LLM_FLAGS=none."""
    if environment.get("JAXRL_LLM_FLAGS") == "none":
        return {}
    variable, flags = _FLAGS.get(platform, ("", {}))
    words = f"{environment.get('XLA_FLAGS', '')} {environment.get('LIBTPU_INIT_ARGS', '')}".split()
    given = {word.lstrip("-").partition("=")[0] for word in words}
    lacking = [f"--{name}={value}" for name, value in flags.items() if name not in given]
    return {variable: " ".join(lacking)} if lacking else {}


def set_flags(platform: str, environment: MutableMapping[str, str] = os.environ) -> str:
    """Add the platform's flags to the environment, before JAX's first computation; returns them as a shell has them."""
    found = added(platform, environment)
    for variable, flags in found.items():
        environment[variable] = f"{environment.get(variable, '')} {flags}".strip()
    return " ".join(f"{variable}='{flags}'" for variable, flags in found.items())


def has_gpu() -> bool:
    """Return whether a run of this process would take an NVIDIA GPU."""
    allowed = os.environ.get("JAX_PLATFORMS", "cuda").split(",")[0]
    return allowed in ("cuda", "gpu") and Path("/dev/nvidiactl").exists()
