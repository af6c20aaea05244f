"""The start of a process before its first computation: compilation cache, kept memory, other processes."""

import argparse
import importlib.util
import os
import re
import sys
from pathlib import Path

import filelock
import jax
from absl import logging

from jaxrl_llm.config import flags
from jaxrl_llm.ground import heap
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.machine import cache_folder

_OTHERS = ByName({"join_others": "jaxrl_llm.config.joining"})


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
    if jax.distributed.is_initialized() or not (named or launched or _has_tpu()):
        return
    if named and not launched and None in place:
        raise ValueError(
            f"coordinator={coordinator}, processes={count}, process={index} leave out which process this is of how "
            "many; give --coordinator HOST:PORT, --processes COUNT and --process INDEX, or none of them"
        )
    if coordinator is not None and not re.fullmatch(r".+:\d{1,5}", coordinator):
        raise ValueError(f"coordinator={coordinator} must be HOST:PORT of process 0, for example host0:8476")
    _OTHERS["join_others"](place, start_timeout_s, heartbeat_timeout_s, may_be_alone=not (named or launched))


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
    """Return whether this may be a host of a TPU pod slice."""
    if os.environ.get("JAX_PLATFORMS", "tpu").split(",")[0] != "tpu" or importlib.util.find_spec("libtpu") is None:
        return False
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def is_first() -> bool:
    """Return whether this is the process that writes results."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0
