"""What a run ran on: compilation cache, several hosts, and the record of commit, versions, device and cores.

`start_jax` also lets glibc's malloc keep the memory that a step frees: the next step need not fault it in anew.
"""

import ctypes
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import jax

from jaxrl_llm.cache_folder import cache_folder
from jaxrl_llm.run_log import read_json

__all__ = ["check_dir", "describe", "is_first_host", "start_jax"]


def start_jax() -> None:
    """Turn the compilation cache on, keep freed memory, and join the other hosts if this is one of several.

    The cache lies in the user's cache folder unless JAX_COMPILATION_CACHE_DIR says otherwise. Several hosts are those
    that JAX recognises (TPU pods, SLURM, Open MPI), or JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and
    JAX_PROCESS_ID.
    """
    _keep_freed_memory()
    cache = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_folder() / "xla")
    jax.config.update("jax_compilation_cache_dir", str(cache))
    _repair(cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)  # many small entries cost more than they save
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Entries are written under a lock only when there is a bound; parallel runs share the folder.
    jax.config.update("jax_compilation_cache_max_size", 4 * 2**30)
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        jax.distributed.initialize(
            os.environ["JAX_COORDINATOR_ADDRESS"],
            int(os.environ["JAX_NUM_PROCESSES"]),
            int(os.environ["JAX_PROCESS_ID"]),
        )


def _keep_freed_memory() -> None:
    """Let glibc keep what XLA frees after a step for the next one; by default every step faults it in page by page.

    That is a sixth of a training step's time on a CPU, see experiments/performance/README.md. Programs run in the
    calling thread, for only the main arena holds arrays of any size. What a compilation frees goes back to the system:
    it lies in pieces that no step can use.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)
    _make_room(libc)
    jax.config.update("jax_cpu_enable_async_dispatch", False)

    def trim(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and duration_secs > 0.5:
            libc.malloc_trim(0)

    jax.monitoring.register_event_duration_secs_listener(trim)


def _make_room(libc: Any) -> None:
    """A free block below all else, for what is small and stays.

    A step's temporaries then lie at the end of the heap, which grows a little when they no longer fit. In a gap, a byte
    that something else took of it would cost their whole size once more.
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    room = libc.malloc(_ROOM)
    libc.malloc(_ROOM // 64)  # stays, so that the room is not the end of the heap
    libc.free(room)  # neither was touched, so neither is memory yet


_ROOM = 2**28  # bytes: less than the temporaries that matter, more than the rest
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def _repair(cache: Path) -> None:
    """Remove entries without their time of access, of a killed writer: one of them would stop all later writes."""
    cache.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(cache / ".lockfile"):
        for entry in cache.glob("*-cache"):
            if not entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists():
                entry.unlink(missing_ok=True)


def is_first_host() -> bool:
    return jax.process_index() == 0


def check_dir(workdir: str, config_hash: str) -> None:
    """Raises ValueError when the DIR belongs to a run of another config."""
    known = read_json(Path(workdir) / "config.json")
    if known is not None and known.get("config_hash") != config_hash:
        raise ValueError(
            f"{workdir} holds a run of another config (hash {known.get('config_hash')}, this one is {config_hash}); "
            "give another --workdir, or the config in its config.json"
        )


def describe(config: Mapping[str, Any], config_hash: str) -> dict[str, Any]:
    """What config.json records."""
    packages = ("jaxrl_llm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "config": dict(config),
        "config_hash": config_hash,
        "commit": _commit(),
        "versions": {name: _version(name) for name in packages},
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with + when it has changes; None outside a checkout."""
    here = Path(__file__).parent
    try:
        run = lambda *args: subprocess.run(["git", *args], cwd=here, capture_output=True, text=True)  # noqa: E731
        commit = run("rev-parse", "HEAD")
        dirty = run("status", "--porcelain", "--untracked-files=no")
    except OSError:
        return None
    return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "") if commit.returncode == 0 else None
