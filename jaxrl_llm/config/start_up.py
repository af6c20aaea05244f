"""What a process does before its first computation: compilation cache, memory that is kept, other processes."""

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import jax
from absl import logging
from jax._src import distributed

from jaxrl_llm.config import flags
from jaxrl_llm.config.command_line import FAILED, complain
from jaxrl_llm.ground import heap
from jaxrl_llm.ground.machine import cache_folder


def start_jax() -> str:
    """Keep freed memory, turn the compilation cache on, in the user's cache folder, and set the flags of flags.py,
    which are returned.

    JAX's own environment variables go first: JAX_COMPILATION_CACHE_DIR, and those of `_CACHE` in capitals.
    """
    if logging.get_verbosity() > logging.WARNING:
        logging.set_verbosity(logging.WARNING)  # Orbax reports every phase of a checkpoint at INFO
    flags_set = flags.set_flags("tpu" if _has_tpu() else "gpu" if flags.has_gpu() else "cpu")
    heap.keep_freed()
    cache = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_folder() / "xla")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if os.environ.get("JAX_COMPILATION_CACHE_MAX_SIZE") != "-1":
            _repair(cache)
    except OSError as error:
        jax.config.update("jax_compilation_cache_dir", None)
        print(f"warning: no compiled program is kept: {cache} cannot be written ({error})", file=sys.stderr)
        return flags_set
    jax.config.update("jax_compilation_cache_dir", str(cache))
    for name, value in _CACHE.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    return flags_set


_CACHE = {
    # Entries are written under a lock only when there is a bound; parallel runs share the folder.
    "jax_compilation_cache_max_size": 4 * 2**30,
    # With a bound every write reads the times of all entries: many small ones cost more than they save.
    "jax_persistent_cache_min_compile_time_secs": 0.5,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def _repair(cache: Path) -> None:
    """Remove entries that a killed writer left without their access time: one of them would stop all later writes."""
    with filelock.FileLock(cache / ".lockfile"):
        for entry in cache.glob("*-cache"):
            if not entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists():
                entry.unlink(missing_ok=True)


def join(given: argparse.Namespace, start_timeout_s: int, heartbeat_timeout_s: int) -> None:
    """Join the other processes of the run, where there are any; before the first computation.

    What is not given is read from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or comes from SLURM,
    Open MPI or the TPU pod slice. A wait is said every 15 seconds; after `start_timeout_s` the process ends with
    exit code 1, since the same command may find them all the next time. A process that is not heard of for
    `heartbeat_timeout_s` seconds ends the others: JAX aborts them (exit code 134).

    Raises:
      ValueError: one is given without the others, or the launcher does not say where process 0 is.
    """
    coordinator = given.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count = _number("JAX_NUM_PROCESSES") if given.processes is None else given.processes
    index = _number("JAX_PROCESS_ID") if given.process is None else given.process
    place = (coordinator, count, index)
    named, launched = any(x is not None for x in place), _tasks() > 1
    if not (named or launched or _has_tpu()):
        return
    if named and not launched and None in place:
        raise ValueError(
            f"coordinator={coordinator}, processes={count}, process={index} leave out which process this is of how "
            "many; give --coordinator HOST:PORT, --processes COUNT and --process INDEX, or none of them"
        )
    if coordinator is not None and not re.fullmatch(r".+:\d{1,5}", coordinator):
        raise ValueError(f"coordinator={coordinator} must be HOST:PORT of process 0, for example host0:8476")
    jax.config.update("jax_enable_preemption_service", True)  # `processes.agreed_stop` asks it after every step
    try:
        with _heard(start_timeout_s):
            # JAX would abort with a stack trace, so it has a little longer.
            limit = start_timeout_s + 30
            jax.distributed.initialize(
                *place, initialization_timeout=limit, heartbeat_timeout_seconds=heartbeat_timeout_s
            )
    except ValueError as error:
        if not (named or launched):
            return  # a TPU host of its own
        raise ValueError(f"the processes cannot join ({error}); see docs/several_processes.md") from error
    # The service's listener, in C, has taken SIGTERM unseen by Python: it would swallow it while the run starts.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    uncaught = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, jax.errors.JaxRuntimeError):
            text = " ".join(str(error).split())[:500]
            where = f"process {jax.process_index()} of {jax.process_count()}"
            lost = "where another process has ended, its own output says why, and the same commands go on"
            print(f"error: {where} failed ({text}); {lost}", file=sys.stderr)
        else:
            uncaught(kind, error, trace)
        leave(1)

    sys.excepthook = end


@contextlib.contextmanager
def _heard(limit_s: int) -> Iterator[None]:
    """While this process waits for the others to join, say so every 15 seconds, and end it after `limit_s`.

    Which of them are missing nobody knows before all are there: JAX's coordinator counts them and tells no one.
    """
    began, joined = time.monotonic(), threading.Event()

    def speak() -> None:
        while not joined.wait(min(15.0, limit_s / 4)):
            waited = time.monotonic() - began
            text = f"{_awaited()} ({waited:.0f} s of processes.start_timeout_s={limit_s})"
            if waited < limit_s:
                print(f"waiting for other processes: {text}", file=sys.stderr, flush=True)
            else:
                complain(TimeoutError(f"not all processes have joined: {text}; see docs/several_processes.md"), FAILED)
                os._exit(FAILED)  # the main thread is inside JAX, which hears no exception

    threading.Thread(target=speak, daemon=True).start()
    try:
        yield
    finally:
        joined.set()


def _awaited() -> str:
    """Which process waits, and what it can know of those that it waits for."""
    state = distributed.global_state
    if state.client is None or state.coordinator_address is None:
        return "the launcher has not yet said where they are"
    here, where = f"this is process {state.process_id} of {state.num_processes}", state.coordinator_address
    silent = "one that prints no such line has not started"
    if state.process_id == 0:
        return f"{here}; {silent}, or cannot reach {where}"
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, ValueError):
        return f"{here}, and nothing answers at {where}: process 0 has not started, or cannot be reached from here"
    return f"{here}, and process 0 answers at {where}; {silent}"


def leave(code: int, *, alone: bool = True) -> int:
    """The exit code; of several processes, one that ends `alone` does so here if it failed.

    At exit it would wait for the others, which wait for it: they are to see a broken connection, or miss heartbeats.
    """
    if jax.distributed.is_initialized() and code and alone:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _number(name: str) -> int | None:
    value = os.environ.get(name)
    if value is not None and not value.isdecimal():
        raise ValueError(f"{name}={value} must be a whole number")
    return None if value is None else int(value)


def _tasks() -> int:
    """How many processes SLURM (srun) or Open MPI has started."""
    slurm = _number("SLURM_NTASKS") if "SLURM_STEP_NODELIST" in os.environ else 1
    return max(slurm or 1, _number("OMPI_COMM_WORLD_SIZE") or 1)


def _has_tpu() -> bool:
    """Whether this may be a host of a TPU pod slice."""
    if os.environ.get("JAX_PLATFORMS", "tpu").split(",")[0] != "tpu" or importlib.util.find_spec("libtpu") is None:
        return False
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def is_first() -> bool:
    """Whether this is the process that writes what all have computed."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0
