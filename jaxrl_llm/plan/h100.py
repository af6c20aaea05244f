"""What XLA's GPU compiler must know of an H100 SXM to compile without one.

Figures: openxla/xla, xla/backends/gpu/target_config/specs/h100_sxm.txtpb, an `xla.gpu.GpuTargetConfigProto` as text.
"""

__all__ = ["TARGET"]

_DEVICE = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_core": 233472,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "memory_bandwidth": 3352320000000,
    "l2_cache_size": 52428800,
    "clock_rate_ghz": 1.98,
    "device_memory_size": 84942979072,
    "shared_memory_per_block_optin": 232448,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
_DEVICE_TEXT = "\n".join(f"  {name}: {value}" for name, value in _DEVICE.items())

TARGET = f"""gpu_device_info {{
{_DEVICE_TEXT}
  cuda_compute_capability {{ major: 9 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "NVIDIA H100 80GB HBM3"
"""
