"""Worker processes with limits of time and memory, for code that may hang, crash or eat memory.

Workers start when first needed, as fresh interpreters, and stay until the program ends. One that exceeds its limit is
killed and replaced, and the others do not wait for it. The tasks use them; they stand in this room because a guard
forks, which only a process that has imported next to nothing may. Each is two processes:

guard     the child of this program. It waits until its standard input closes, because the program let it go or is gone,
          or until its worker ends; then it kills all that the worker has started, and ends.
worker    the child of the guard. It reads ("load", pickled function) once and then ("ask", arguments) from its pipe,
          and answers each in JSON. What it prints comes to this program, which shows it without what steers a terminal.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from jaxrl_llm.ground.terminal import visible
from jaxrl_llm.ground.worker_errors import DIED, TIMEOUT, described

_LOADING = 120.0  # seconds in which a worker must have imported what its function needs
_LINE = 2**16  # bytes of what a worker prints that are shown at once
_PATIENCE = 10.0  # seconds that a guard gets for ending its worker


@dataclasses.dataclass(frozen=True)
class Reply:
    """The function's result as JSON; `error` is empty, `TIMEOUT`, `DIED` or the exception."""

    value: Any = None
    error: str = ""


def pickled(function: Any, whose: str, remedy: str) -> bytes:
    """Pickle a function for `Pool.ask`.

    Args:
        whose: the beginning of the error.
        remedy: what the function should be.

    Raises:
        ValueError: it cannot be sent to a process.
    """
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{whose} cannot be sent to a process ({error}); make it {remedy}") from error


class Pool:
    """At most `most` workers, each with `memory` bytes of address space: what needs more gets a MemoryError.

    The limit of memory holds for a worker and for each process that it starts, by itself.
    """

    def __init__(self, most: int, memory: int):
        self._most, self._memory = most, memory
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()  # one question after the other: there are never more workers than that
        atexit.register(self.close)

    def ask(self, name: str, function: bytes, time_limit: float, questions: Sequence[tuple[Any, ...]]) -> list[Reply]:
        """Return the function's reply to every question, in order.

        Args:
            name: of the function, for messages.
            function: pickled, with a method `load` if it has something to import first. Its results are plain JSON.
            time_limit: seconds of one question, after which its worker is killed.
            questions: the arguments of every call.

        Raises:
            ValueError: a worker cannot load the function.
        """
        with self._lock:
            return self._ask(name, (time_limit, function), list(questions))

    def close(self) -> None:
        """End all workers; the next question starts new ones."""
        with self._lock:
            while self._idle:
                self._idle.pop().end()

    def _ask(self, name: str, job: tuple[float, bytes], questions: list[tuple[Any, ...]]) -> list[Reply]:
        waiting = deque(range(len(questions)))
        replies = [Reply()] * len(questions)
        workers = self._take(job)

        def next_question(worker: _Worker) -> None:
            if waiting:
                worker.ask(waiting[0], questions[waiting.popleft()])
            else:
                worker.rest()

        def lost(worker: _Worker, why: str) -> None:
            workers.remove(worker)
            worker.end()
            if not worker.loaded:
                raise ValueError(f"{name} cannot be loaded in a worker ({why}); see what it wrote above")
            if worker.question is not None:
                replies[worker.question] = Reply(error=why)

        try:
            for worker in [worker for worker in workers if worker.loaded]:
                next_question(worker)
            while waiting or any(worker.question is not None for worker in workers):
                unanswered = len(waiting) + sum(worker.question is not None for worker in workers)
                while len(workers) < min(self._most, unanswered):
                    workers.append(_Worker(job, self._memory))
                soonest = min(worker.deadline for worker in workers)
                patience = None if soonest == math.inf else max(0.0, soonest - time.monotonic())
                heard = multiprocessing.connection.wait([worker.connection for worker in workers], patience)
                for worker in [worker for worker in workers if worker.connection in heard]:
                    try:
                        kind, content = json.loads(worker.connection.recv_bytes())
                    except (EOFError, ConnectionResetError):
                        lost(worker, DIED)
                        continue
                    if kind == "failed":
                        raise ValueError(f"{name} cannot be loaded in a worker ({content})")
                    worker.loaded = True
                    if worker.question is not None:
                        replies[worker.question] = Reply(content) if kind == "value" else Reply(error=content)
                    next_question(worker)
                now = time.monotonic()
                for worker in [worker for worker in workers if worker.deadline <= now]:
                    lost(worker, TIMEOUT)
            return replies
        finally:
            for worker in workers:
                if worker.question is None:  # also one that is still loading: it is ready for the next call
                    self._idle.append(worker)
                else:
                    worker.end()

    def _take(self, job: tuple[float, bytes]) -> "list[_Worker]":
        """The idle workers that have loaded this function; the others end."""
        fitting = [worker for worker in self._idle if worker.job == job and worker.guard.poll() is None]
        for worker in self._idle:
            if worker not in fitting:
                worker.end()
        self._idle.clear()
        return fitting


class _Worker:
    """A process that runs one function with one time limit, and its guard."""

    def __init__(self, job: tuple[float, bytes], memory: int):
        self.connection, theirs = multiprocessing.Pipe()
        # The worker can import whatever this process can, the user's own modules too.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", f"from {__name__} import work; work({theirs.fileno()}, {memory})"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.guard = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), env=environment, start_new_session=True, **pipes
        )
        self.shown = threading.Thread(target=_show, args=(self.guard.stderr,), daemon=True)
        self.shown.start()
        theirs.close()
        self.job = job
        self.loaded = False
        self.question: int | None = None  # what it is busy with
        self.deadline = time.monotonic() + _LOADING
        self._send(("load", job[1]))

    def ask(self, index: int, question: tuple[Any, ...]) -> None:
        self.question, self.deadline = index, time.monotonic() + self.job[0]
        self._send(("ask", question))

    def rest(self) -> None:
        self.question, self.deadline = None, math.inf

    def end(self) -> None:
        self.connection.close()
        assert self.guard.stdin is not None
        self.guard.stdin.close()
        try:
            self.guard.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.guard.kill()  # and with it the worker
            self.guard.wait()
        self.shown.join(_PATIENCE)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died; the closed connection shows it
            self.connection.send_bytes(pickle.dumps(message))


def _show(printed: IO[bytes]) -> None:
    """Write what a worker prints to the standard error of this program, until the worker has ended."""
    with printed:
        for piece in iter(lambda: printed.readline(_LINE), b""):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, and the worker must not wait
                sys.stderr.write(visible(piece.decode(errors="replace")))
                sys.stderr.flush()


def work(descriptor: int, memory: int) -> None:
    """Run the two processes of a worker; its pipe has this file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program, which then closes the pipes
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # a process whose parent ends becomes the guard's child, in any session
    guard, worker = os.getpid(), os.fork()
    if worker:
        os.close(descriptor)
        _guard(worker)
        return
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == guard:
        _answer(descriptor, memory)


def _guard(worker: int) -> None:
    """Wait for the end of the program or of the worker; then kill whatever the worker has started, and wait for it."""
    watched = [0]
    with contextlib.suppress(AttributeError, OSError):
        watched.append(os.pidfd_open(worker))  # readable when it has ended
    select.select(watched, [], [])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    while True:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _answer(descriptor: int, memory: int) -> None:
    """Answer questions until the pipe closes."""
    with contextlib.suppress(ValueError, OSError):  # a lower limit of the system is kept
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a function prints does not mix with the program's output
    connection = Connection(descriptor)
    function: Any = None
    while True:
        try:
            kind, content = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):  # reset: it ended with an answer unread
            return
        try:
            if kind == "load":
                function = pickle.loads(content)
                if load := getattr(function, "load", None):
                    load()
                reply = ("loaded", None)
            else:
                reply = ("value", function(*content))
        except Exception as error:
            reply = ("failed" if kind == "load" else "error", described(error))
        try:
            connection.send_bytes(json.dumps(reply).encode())
        except BrokenPipeError:
            return


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _children() -> list[int]:
    """The processes whose parent is this one."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            _, _, fields = status.read_text(errors="replace").rpartition(")")  # after a name of any characters
            if int(fields.split()[1]) == os.getpid():
                found.append(int(status.parent.name))
    return found
