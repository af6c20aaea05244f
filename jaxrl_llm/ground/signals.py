"""The signals that end a process: at once with one line, or a run after its step. It imports in a few milliseconds.

Python calls a handler when the main thread comes back to it, which a compilation or a rollout puts off for minutes. So
a thread reads each signal from the file descriptor that Python's handler in C writes it to, and acts on it by itself.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
_SHOW_CURSOR = b"\x1b[?25h\n"  # which a live display hides
_PATIENCE = 2.0  # seconds for the last line, which a folder or a terminal that hangs could keep for ever

_hearers: list[Callable[[int], None]] = []  # the last one is told of the next signal, in the thread that listens


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

    def leave(number: int) -> None:
        late = threading.Timer(_PATIENCE, os._exit, (128 + number,))
        late.daemon = True
        late.start()
        what = ""
        with suppress(Exception):  # a folder that cannot be read does not keep the process alive
            what = onward()
        with suppress(OSError):  # the terminal may be gone
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)
            os.write(2, f"stopped by {_NAMES[signal.Signals(number)]}{what}\n".encode())
        os._exit(128 + number)

    for number in ending_signals():
        signal.signal(number, lambda number, frame: None)  # so that it is written to the thread
    if not _hearers:
        _listen()
    _hearers[:1] = [leave]


@contextmanager
def interruptible(
    finishing: Callable[[], str] = lambda: "", at_once: Callable[[], None] = lambda: None
) -> Iterator[Callable[[], int]]:
    """Gives the number of the signal that asked to stop, 0 so far, in the main thread; in another one always 0.

    The first signal prints `finishing()` at once. A second one calls `at_once()` and does what it did before, which in
    a command is to end the process, whatever the main thread does.
    """
    if threading.current_thread() is not threading.main_thread():  # Python gives handlers to the main thread alone
        yield lambda: 0
        return
    asked: list[int] = []
    heard: list[int] = []  # by the thread, which is the first to know
    before_us = _hearers[-1:]

    def ask(number: int, frame: object) -> None:
        if asked and not before_us:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        asked.append(number)

    def say() -> None:
        with suppress(OSError):  # the terminal may be gone
            if text := finishing():
                sys.stderr.write(f"{text}\n")  # at once, unlike print
                sys.stderr.flush()

    def hear(number: int) -> None:
        heard.append(number)
        if len(heard) == 1:  # whoever reads standard error may hang, and the second signal is to be heard
            threading.Thread(target=say, daemon=True).start()
        else:
            at_once()
            for outer in before_us:
                outer(number)

    before = {number: signal.signal(number, ask) for number in ending_signals()}
    stop = (lambda: None) if before_us else _listen()
    _hearers.append(hear)
    try:
        yield lambda: asked[0] if asked else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _hearers.remove(hear)
        stop()


def _listen() -> Callable[[], None]:
    """Start the thread that tells the last of `_hearers` of every signal; returns what ends it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def listen() -> None:
        while numbers := os.read(reader, 16):
            for number in numbers:
                with suppress(Exception):  # the terminal may be gone
                    if number in _NAMES and _hearers:
                        _hearers[-1](number)
        os.close(reader)

    def stop() -> None:
        signal.set_wakeup_fd(before)
        os.close(writer)

    threading.Thread(target=listen, name="signals", daemon=True).start()
    return stop


def _forget() -> None:
    """In a child of a fork, whose signals are its own: they are not written to its parent's thread."""
    if _hearers:
        _hearers.clear()
        signal.set_wakeup_fd(-1)
        for number in ending_signals():
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
