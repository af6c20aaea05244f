"""What the machine gives a process: its cores, a folder for what can be made again, and the signals that end a run."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def usable_cores() -> list[int]:
    """The cores on which this process may run: fewer than the machine's where it is pinned."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/jaxrl_llm, or the same below ~/.cache: data, warm starts and compiled programs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_llm"


class Stopped(KeyboardInterrupt):
    """A signal ended the run after a step and, `saved`, its checkpoint."""

    def __init__(self, text: str, number: int, saved: bool = False):
        super().__init__(text)
        self.signal, self.saved = number, saved


def ending_signals() -> list[int]:
    """Ctrl-C, SIGTERM and the end of the terminal; without the last under `nohup`, which has it ignored."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if kept else [signal.SIGHUP])]


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
