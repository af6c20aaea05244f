"""The accelerators that a plan knows: their peaks, and devices to compile for without having one."""

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from jaxrl_llm.ground import ranges


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of one device."""

    flops: float  # per second, dense bfloat16
    memory: float  # bytes
    bandwidth: float  # bytes/s of the memory
    network: float  # bytes/s that leave by all links: a collective over fewer links takes longer than a plan says
    source: str


CHIPS = {
    "v5e": Chip(197e12, 16e9, 819e9, 200e9, "cloud.google.com/tpu/docs/v5e: 197 TFLOP/s, 16 GB, 819 GB/s, 1600 Gbps"),
    "v5p": Chip(459e12, 95e9, 2765e9, 600e9, "cloud.google.com/tpu/docs/v5p: 459 TFLOP/s, 95 GB, 2765 GB/s, 4800 Gbps"),
    "v6e": Chip(918e12, 32e9, 1640e9, 448e9, "cloud.google.com/tpu/docs/v6e: 918 TFLOP/s, 32 GB, 1640 GB/s, 3584 Gbps"),
    "h100": Chip(989e12, 80e9, 3350e9, 450e9, "H100 SXM data sheet: 989 TFLOP/s, 80 GB, 3.35 TB/s, NVLink 900 GB/s"),
}

# What XLA's GPU compiler must know of an H100 SXM to compile without one, an `xla.gpu.GpuTargetConfigProto` as text.
# Figures: openxla/xla, xla/backends/gpu/target_config/specs/h100_sxm.txtpb.
_H100_TARGET = """gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def topology_devices(topology: str) -> tuple[Chip, Sequence[Any]]:
    """The chip and the devices of "v5p:4x4x4" or "h100:8".

    Raises:
      ValueError: an unknown chip or shape.
      ImportError: the compiler of this chip is not installed; the message names the extra.
    """
    name, _, shape = topology.partition(":")
    if name not in CHIPS:
        raise ValueError(
            f"topology={topology!r} has no known chip{ranges.suggestion(name, CHIPS)}; for example v5e:2x2"
        )
    if not shape or not all(part.isdigit() and int(part) for part in shape.split("x")):
        raise ValueError(f"topology={topology!r} lacks its shape, for example v5p:4x4x4 or h100:8")
    return CHIPS[name], (_gpus(shape) if name == "h100" else _tpus(topology))


def _tpus(topology: str) -> Sequence[Any]:
    # One process may compile beside others, and there is neither a metadata server nor a worker to ask.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError("compiling for a TPU needs libtpu: pip install jaxrl_llm[tpu]")
    try:
        return topologies.get_topology_desc(topology, "tpu").devices
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise ValueError(f"topology={topology!r} is none that libtpu knows: {str(error).splitlines()[0]}") from error


def _gpus(count: str) -> Sequence[Any]:
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if not count.isdigit():
        raise ValueError(f"topology='h100:{count}' must name a number of GPUs, for example h100:8")
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ImportError("compiling for an H100 needs jax's CUDA plugin: pip install jaxrl_llm[gpu]")
    return topologies.get_topology_desc("", "cuda", target_config=_H100_TARGET, topology=f"1x1x{count}").devices
