"""The heap of a process that computes on a CPU: what XLA frees after a step is kept, in one place, for the next one."""

import ctypes
import functools
import mmap
import sys
from typing import Any

import jax
import numpy as np


def keep_freed() -> None:
    """Let glibc keep what XLA frees after a step for the next one; by default every step faults it in page by page.

    That is a sixth of a training step's time on a CPU, see experiments/performance/details.md. Programs run in the
    calling thread, because only the main arena keeps large arrays. Memory freed by a compilation is returned to the
    system: it is in pieces too small for a step. So is what an earlier run of the process has left.
    """
    libc = _glibc()
    if libc is not None:
        _keep()
        libc.malloc_trim(0)


@functools.cache  # once in a process
def _keep() -> None:
    libc = _glibc()
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)
    _make_room(libc)
    jax.config.update("jax_cpu_enable_async_dispatch", False)

    def trim(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and duration_secs > 0.1:  # or a load from the cache
            libc.malloc_trim(0)

    jax.monitoring.register_event_duration_secs_listener(trim)


def settle() -> None:
    """Once what stays through a run is there: return what making it has freed, and make room behind it.

    Arrays that stay have filled the room that was made before them, and reading them has left gaps, which would stay
    resident and are too small for a step.
    """
    libc = _glibc()
    if libc is not None and _keep.cache_info().currsize:
        libc.malloc_trim(0)
        _make_room(libc)


def owned(tree: Any) -> Any:
    """The same arrays, in memory that a program may be given to overwrite; those of the argument are gone.

    On a CPU an array that was read from a file lies in the memory of numpy. A program that it is donated to cannot
    write there, and makes another one beside its temporaries: they then end the heap no more, and as soon as a byte is
    taken from the gap that they leave, the next step takes their full size again.
    """

    def own(x: jax.Array) -> jax.Array:
        if next(iter(x.devices())).platform != "cpu":
            return x
        copy = jax.block_until_ready(x.copy())
        x.delete()
        return copy

    return jax.tree.map(own, tree)


def copied(tree: Any) -> Any:
    """Copies of what a CPU holds, from which a checkpoint is written while training goes on; other arrays as they are.

    A program cannot overwrite an array that a writer holds, and would do what `owned` tells of. Each copy is a mapping
    of its own: it takes no room that a step needs, and goes back to the system as soon as it is written.
    """

    def copy(x: Any) -> Any:
        on_cpu = isinstance(x, jax.Array) and all(device.platform == "cpu" for device in x.devices())
        if not on_cpu or not x.is_fully_addressable or not x.nbytes:
            return x
        memory = np.frombuffer(mmap.mmap(-1, x.nbytes), x.dtype).reshape(x.shape)
        np.copyto(memory, x)
        return jax.device_put(memory, x.sharding, may_alias=True)

    return jax.tree.map(copy, tree)


@functools.cache
def _glibc() -> Any:
    """None where another allocator serves the process."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "mallopt") else None


def _make_room(libc: Any) -> None:
    """Reserve a free block in front of the end of the heap for small, long-lived allocations.

    A step's temporaries then stay at the end of the heap, which can grow a little. In a gap between other allocations,
    a single byte taken from it would make the next step allocate their full size again.
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    room = libc.malloc(_ROOM)
    libc.malloc(_ROOM // 64)  # never freed, so that the block above is not at the end of the heap
    libc.free(room)  # neither was touched, so no memory is in use yet


_ROOM = 2**28  # bytes: less than the temporaries that matter, more than the rest
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
