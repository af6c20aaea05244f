"""Ctrl-C and SIGTERM end a run after its current step and its checkpoint."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Stopped", "interruptible"]


class Stopped(KeyboardInterrupt):
    """A signal ended the run: saved, after a step and its checkpoint, or at once."""

    def __init__(self, text: str, number: int, saved: bool = False):
        super().__init__(text)
        self.signal, self.saved = number, saved


@contextmanager
def interruptible() -> Iterator[Callable[[], int]]:
    """Gives the number of the signal that asked to stop, 0 so far.

    Ctrl-C and SIGTERM end the run after its current step; a second one ends it at once.
    """
    asked = []

    def ask(number: int, frame: object) -> None:
        if asked:
            raise Stopped("stopped at once", number)
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked[0] if asked else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
