"""What the machine gives a process: its cores, and a folder for what can be made again."""

import os
from pathlib import Path


def usable_cores() -> list[int]:
    """The cores on which this process may run: fewer than the machine's where it is pinned."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/jaxrl_llm, or the same below ~/.cache: data, warm starts and compiled programs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_llm"
