"""Resources that the machine gives a process: cores, memory, and a folder for what can be made again."""

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


def free_memory_bytes() -> int:
    """Return the bytes that this process could hold in all: those it has and those free, or a cgroup's bound."""
    fields = _fields("/proc/meminfo")
    free = fields["MemAvailable"] + resident_bytes() if "MemAvailable" in fields else memory_bytes()
    return min(memory_bytes(), free)


def resident_bytes(name: str = "VmRSS") -> int:
    """Bytes of the process that are in memory (VmRSS), or the most that were (VmHWM); 0 off Linux."""
    return _fields("/proc/self/status").get(name, 0)


def _fields(path: str) -> dict[str, int]:
    """The sizes that a file of /proc tells, in bytes; {} off Linux."""
    with suppress(OSError):
        lines = (line.split() for line in Path(path).read_text().splitlines())
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
    return {}


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


def refuse_links(*folders: Path) -> None:
    """Refuse to write into folders of which a file or folder is a symbolic link: what is written would go elsewhere.

    Raises:
        ValueError: the first link and where it leads.
    """
    for path in sorted(path for folder in folders if folder.is_dir() for path in folder.iterdir()):
        if path.is_symlink():
            raise ValueError(
                f"{path} is a symbolic link to {os.readlink(path)}, and nothing is written through one; remove it "
                "(--checkpoints PLACE keeps checkpoints elsewhere)"
            )


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
