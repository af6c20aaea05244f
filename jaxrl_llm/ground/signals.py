"""The signals that end a process: at once with one line, or a run after its step. It imports in a few milliseconds."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
_SHOW_CURSOR = b"\x1b[?25h"  # which a live display hides


class Stopped(KeyboardInterrupt):
    """A signal ended the run after a step and, `saved`, its checkpoint."""

    def __init__(self, text: str, number: int, saved: bool = False):
        super().__init__(text)
        self.signal, self.saved = number, saved


def ending_signals() -> list[int]:
    """Ctrl-C, SIGTERM and the end of the terminal; without the last under `nohup`, which has it ignored."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if kept else [signal.SIGHUP])]


def end_at_once(onward: Callable[[], str] = lambda: "") -> None:
    """From now on end this process at once on any of these signals, with the line "stopped by Ctrl-C" and `onward()`.

    Not by an exception: libraries swallow one while they are imported, or print it many lines long. What a run has
    written by then is as after a kill, from which it resumes.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        for ending in ending_signals():
            signal.signal(ending, signal.SIG_IGN)
        what = ""
        with suppress(Exception):  # a folder that cannot be read does not keep the process alive
            what = onward()
        with suppress(OSError):  # the terminal may be gone
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)
            os.write(2, f"stopped by {_NAMES[signal.Signals(number)]}{what}\n".encode())
        os._exit(128 + number)

    for number in ending_signals():
        signal.signal(number, leave)


@contextmanager
def interruptible() -> Iterator[Callable[[], int]]:
    """Gives the number of the signal that asked to stop, 0 so far.

    Ctrl-C, SIGTERM and the end of the terminal end the run after its current step; a second one does what it did
    before, which is to end it at once.
    """
    asked = []

    def ask(number: int, frame: object) -> None:
        if asked:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in ending_signals()}
    try:
        yield lambda: asked[0] if asked else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
