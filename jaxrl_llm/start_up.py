"""What a process does before its first computation: compilation cache, several hosts, memory that is kept.

`start_jax` also lets glibc's malloc keep the memory that a step frees: the next step need not fault it in anew.
"""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import filelock
import jax
from absl import logging

from jaxrl_llm.cache_folder import cache_folder

__all__ = ["is_first_host", "start_jax"]


def start_jax() -> None:
    """Turn the compilation cache on, keep freed memory, and join the other hosts if this is one of several.

    The cache lies in the user's cache folder unless JAX_COMPILATION_CACHE_DIR says otherwise. Several hosts are those
    that JAX recognises (TPU pods, SLURM, Open MPI), or JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and
    JAX_PROCESS_ID.
    """
    if logging.get_verbosity() > logging.WARNING:
        logging.set_verbosity(logging.WARNING)  # Orbax reports every phase of a checkpoint at INFO
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
