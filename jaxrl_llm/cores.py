"""The cores of this process."""

import os

__all__ = ["usable_cores"]


def usable_cores() -> list[int]:
    """The cores on which this process may run: fewer than the machine's where it is pinned."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
