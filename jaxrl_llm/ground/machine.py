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


def folder_of_its_own(workdir: str | os.PathLike[str]) -> Path:
    """The path of a DIR; raises ValueError for none, as of an unset variable, and for the root of the file system."""
    if not os.fspath(workdir) or Path(workdir).resolve() == Path("/"):
        raise ValueError(f"--workdir={workdir} is no folder of its own; name one, for example --workdir=runs/first")
    return Path(workdir)


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
