"""What the machine gives a process: its cores, and a folder for what can be made again."""

import os
from contextlib import suppress
from pathlib import Path


def usable_cores() -> list[int]:
    """The cores on which this process may run: fewer than the machine's where it is pinned."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def memory_bytes() -> int:
    """The memory that this process may use: the machine's, or less where a cgroup (a container, a job) bounds it."""
    bounds = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, own = line.split(":", 2)
            limit = {"": "memory.max", "memory": "memory/memory.limit_in_bytes"}.get(kinds)  # versions 2 and 1
            if limit is not None:
                place = Path("/sys/fs/cgroup", limit)
                group = place.parent / own.lstrip("/")
                for folder in (group, *group.parents):
                    with suppress(OSError, ValueError):  # none there, or "max"
                        bounds.append(int((folder / place.name).read_text()))
    return min(bounds)


_MAPS = Path("/proc/self/maps")  # absent where there is no Linux
_MOST_MAPS = 50_000


def forget_programs() -> None:
    """Forget what JAX has compiled once it is much: it holds memory maps, of which Linux gives a process 65530.

    Without one left XLA crashes. The programs of a run take up to 3,000, those of a module of tests a few thousand.
    """
    if _MAPS.exists() and len(_MAPS.read_bytes().splitlines()) > _MOST_MAPS:
        import jax  # here, since what asks for cores or folders needs none

        jax.clear_caches()


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/jaxrl_llm, or the same below ~/.cache: data, warm starts and compiled programs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_llm"


def folder_of_its_own(workdir: str | os.PathLike[str]) -> Path:
    """The path of a DIR.

    Raises:
        ValueError: it is none, as of an unset variable, or the root of the file system, or its name is not UTF-8, which
          checkpoints cannot have.
    """
    name = os.fspath(workdir)
    if name != name.encode(errors="replace").decode():
        raise ValueError(f"--workdir={name} is not UTF-8; give the folder another name")
    if not os.fspath(workdir) or os.path.realpath(workdir) == "/":
        raise ValueError(f"--workdir={workdir} is no folder of its own; name one, for example --workdir=runs/first")
    return Path(workdir)
