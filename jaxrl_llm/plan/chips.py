"""The accelerators that a plan knows: their peaks, and devices to compile for without having one."""

import contextlib
import dataclasses
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh

from jaxrl_llm.config import flags
from jaxrl_llm.ground import ranges
from jaxrl_llm.ground.peaks import FLOPS


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of one JAX device."""

    flops: float  # per second, dense bfloat16
    memory: float  # bytes
    bandwidth: float  # bytes/s of the memory
    source: str


# TPUs: cloud.google.com/tpu/docs, a page each; a TPU7x chip is two devices with half each. GPUs: NVIDIA's data sheets
# of SXM modules.
CHIPS = {
    "v4": Chip(FLOPS["TPU v4"], 32e9, 1228e9, "docs/v4: 275 TFLOP/s, 32 GB, 1228 GB/s"),
    "v5e": Chip(FLOPS["TPU v5e"], 16e9, 819e9, "docs/v5e: 197 TFLOP/s, 16 GB, 819 GB/s"),
    "v5p": Chip(FLOPS["TPU v5p"], 95e9, 2765e9, "docs/v5p: 459 TFLOP/s, 95 GB, 2765 GB/s"),
    "v6e": Chip(FLOPS["TPU v6e"], 32e9, 1640e9, "docs/v6e: 918 TFLOP/s, 32 GB, 1640 GB/s"),
    "v7x": Chip(FLOPS["TPU7x"], 96e9, 3690e9, "docs/tpu7x: of two, 2307 TFLOP/s, 192 GB, 7380 GB/s"),
    "a100": Chip(FLOPS["NVIDIA A100"], 80e9, 2039e9, "A100 80GB SXM: 312 TFLOP/s"),
    "h100": Chip(FLOPS["NVIDIA H100"], 80e9, 3350e9, "H100 SXM: 989 TFLOP/s"),
    "h200": Chip(FLOPS["NVIDIA H200"], 141e9, 4800e9, "H200 SXM: 989 TFLOP/s"),
    "b200": Chip(FLOPS["NVIDIA B200"], 180e9, 8000e9, "DGX B200: 1440 GB and 64 TB/s of 8"),
}
_TPU_NAMES = {"v7x": "tpu7x"}  # where libtpu has another
NODE = 8  # GPUs that NVLink joins

# What XLA's GPU compiler must know of a GPU to compile without one, an `xla.gpu.GpuTargetConfigProto` as text.
# Figures: openxla/xla, xla/backends/gpu/target_config/specs/.
_TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {per_core}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {optin}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{name}"
"""
_HOPPER = dict(per_core=233472, cores=132, fpus=128, l2=52428800, clock=1.98, optin=232448, major=9)
_GPUS: dict[str, dict[str, Any]] = {
    "a100": dict(per_core=167936, cores=108, fpus=64, bandwidth=2039040000000, l2=41943040, clock=1.41,
                 memory=85100068864, optin=166912, major=8, name="NVIDIA A100-SXM4-80GB"),
    "h100": dict(**_HOPPER, bandwidth=3352320000000, memory=84942979072, name="NVIDIA H100 80GB HBM3"),
    "h200": dict(**_HOPPER, bandwidth=4800000000000, memory=151397597184, name="NVIDIA H200 141GB HBM3e"),
    "b200": dict(per_core=233472, cores=148, fpus=128, bandwidth=7672320000000, l2=132644864, clock=1.965,
                 memory=191514411008, optin=232448, major=10, name="NVIDIA B200"),
}  # fmt: skip


def topology_devices(topology: str) -> tuple[Chip, Sequence[Any]]:
    """The chip and the devices of "v5p:4x4x4", of "v5e:4x4:2", which is two slices, or of "h100:32", four nodes.

    Raises:
      ValueError: an unknown chip or shape.
      ImportError: the compiler of this chip is not installed; the message names the extra.
    """
    name, _, rest = topology.partition(":")
    if name not in CHIPS:
        raise ValueError(
            f"topology={topology!r} has no known chip{ranges.suggestion(name, CHIPS)}; it is one of "
            f"{', '.join(CHIPS)}, for example v5e:2x2"
        )
    shape, *slices = rest.split(":")
    if not shape or not all(part.isdigit() and int(part) for part in shape.split("x")):
        raise ValueError(f"topology={topology!r} lacks its shape, for example v5p:4x4x4 or h100:8")
    if name in _GPUS:
        return CHIPS[name], _gpus(name, rest)
    if len(slices) > 1 or not all(count.isdigit() and int(count) for count in slices):
        raise ValueError(f"topology={topology!r} must end in a number of slices or in none, for example v5e:4x4:2")
    return CHIPS[name], _tpus(topology, name, shape, int(*slices or "1"))


def _tpus(topology: str, name: str, shape: str, slices: int) -> Sequence[Any]:
    # One process may compile beside others, and there is neither a metadata server nor a worker to ask.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError("compiling for a TPU needs libtpu: pip install jaxrl_llm[tpu]")
    flags.set_flags("tpu")  # those of a run, which libtpu reads when it is loaded
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if name == "v4":
        options["chip_config_name"] = "megacore"  # one device a chip, as JAX on a v4 has it
    try:
        return topologies.get_topology_desc(f"{_TPU_NAMES.get(name, name)}:{shape}", "tpu", **options).devices
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise ValueError(f"topology={topology!r} is none that libtpu knows: {str(error).splitlines()[0]}") from error


def _gpus(name: str, count: str) -> Sequence[Any]:
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if not count.isdigit():
        raise ValueError(f"topology='{name}:{count}' must name a number of GPUs, for example {name}:8")
    nodes, alone = divmod(int(count), NODE)
    if nodes and alone:
        raise ValueError(f"topology='{name}:{count}' must be nodes of {NODE} GPUs, for example {name}:{NODE * nodes}")
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ImportError("compiling for a GPU needs jax's CUDA plugin: pip install jaxrl_llm[gpu]")
    shape = f"1x{nodes or 1}x{alone or NODE}"
    return topologies.get_topology_desc("", "cuda", target_config=_TARGET.format(**_GPUS[name]), topology=shape).devices


def lowering_for(device: Any) -> contextlib.AbstractContextManager[Any]:
    """Within it kernels are lowered for this device, which they ask the context for from jax 0.12 on."""
    cores = getattr(device, "core_count" if device.platform == "gpu" else "num_cores", None)
    kind = AbstractDevice(device.device_kind, cores, device.platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))


@contextlib.contextmanager
def compilers_to_a_file() -> Iterator[Path]:
    """Send to this file what compilers write to standard error; what Python writes still goes to the terminal."""
    number, name = tempfile.mkstemp(prefix="jaxrl_llm-plan-", suffix=".log")
    terminal, python = os.dup(2), sys.stderr
    python.flush()
    with os.fdopen(terminal, "w", buffering=1) as kept:
        os.dup2(number, 2)
        os.close(number)
        sys.stderr = kept
        try:
            yield Path(name)
        finally:
            sys.stderr = python
            os.dup2(terminal, 2)
