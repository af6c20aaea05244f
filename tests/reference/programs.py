"""Room for compiled programs in a long test process."""

from pathlib import Path

import jax

_MAPS = Path("/proc/self/maps")  # absent where there is no Linux
_MOST = 50_000


def make_room() -> None:
    """Forget what was compiled once it is much: it holds memory maps, of which Linux gives a process 65530.

    Without one left XLA crashes. A module of tests takes a few thousand.
    """
    if _MAPS.exists() and len(_MAPS.read_bytes().splitlines()) > _MOST:
        jax.clear_caches()
