"""A process that runs a task's verifier on one answer after the other, started by `verifier_pool`.

It reads its orders from a pipe, ("load", pickled verify) once and then ("verify", arguments), and ends when it closes.
"""

import contextlib
import math
import os
import pickle
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["main"]

_MEMORY = 8 * 2**30  # bytes of address space: an expression that explodes raises MemoryError here, not in training
_GRACE = 2.0  # seconds after which a worker ends itself in case its parent is gone


def main(descriptor: int, time_limit: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then closes the pipe
    with contextlib.suppress(ValueError, OSError):  # a lower limit of the system is kept
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    os.dup2(2, 1)  # what a verifier prints does not mix with the run's output
    connection = Connection(descriptor)
    verify: Any = None
    while True:
        try:
            kind, content = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if kind == "load":
            try:
                verify = pickle.loads(content)
                if load := getattr(verify, "load", None):
                    load()
                reply = ("loaded", None)
            except Exception as error:
                reply = ("failed", f"{type(error).__name__}: {error}")
        else:
            # The kernel's own action needs no Python, so it also ends what holds the interpreter.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, time_limit + _GRACE)
            try:
                reply = ("reward", checked(verify(*content)))
            except Exception as error:
                reply = ("error", f"{type(error).__name__}: {error}"[:500])
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            connection.send(reply)
        except BrokenPipeError:
            return


def checked(reward: Any) -> float:
    """The reward as a float.

    Raises:
        ValueError: it is no finite number.
    """
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"the reward {reward!r} is not finite; return a finite number")
    return value


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
