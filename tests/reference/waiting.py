"""Wait until something holds, for tests of several processes."""

import time
from collections.abc import Callable


def until(true: Callable[[], object], seconds: float = 120) -> None:
    """Returns once `true()` is; fails after so many seconds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
