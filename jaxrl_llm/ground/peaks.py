"""Peak rates of devices, by the name that JAX gives their kind."""

# Dense bfloat16 FLOP/s of one JAX device; a key is the beginning of `device_kind`, the longest one counts. Sources:
# cloud.google.com/tpu/docs (v4, v5e, v5p, v6e, tpu7x) and NVIDIA's data sheets (SXM). A TPU7x chip is two devices.
FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device of this kind; None where it is not known, as of every CPU."""
    known = [name for name in FLOPS if kind.startswith(name)]
    return FLOPS[max(known, key=len)] if known else None
