"""The phase that this process is in, set by the code that runs and shown on the screen (`records.progress`)."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run that may take minutes."""

    name: str
    answers: int  # 0: it is not about answers
    began: float  # by time.monotonic()


_under_way: list[Phase] = []  # the last one stands inside those before it
listeners: list[Callable[[Phase], None]] = []  # told of every phase that has ended, not of one that broke off


@contextlib.contextmanager
def phase(name: str, answers: int = 0) -> Iterator[None]:
    """Name the phase of the enclosed code in the words of the screen, such as "rollout", with its number of answers."""
    one = Phase(name, answers, time.monotonic())
    _under_way.append(one)
    try:
        yield
        for told in list(listeners):
            told(one)
    finally:
        _under_way.remove(one)


def under_way() -> tuple[Phase, ...]:
    """The outermost phase first; none between phases."""
    return tuple(_under_way)
