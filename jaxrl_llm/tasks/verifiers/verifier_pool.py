"""Rewards of answers: in this process for a task's own quick rule, in worker processes with a time limit for others.

Workers start when first needed, as fresh interpreters that import no JAX, and stay until the program ends. One that
exceeds its limit is killed and replaced, and the others do not wait for it. A worker reads ("load", pickled verify)
once and then ("verify", question) from its pipe, answers each, and ends when the pipe closes.
"""

import atexit
import concurrent.futures
import contextlib
import dataclasses
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from jaxrl_llm.ground.machine import usable_cores
from jaxrl_llm.tasks.base import Row, Task

__all__ = ["TIMEOUT", "Verdict", "close", "submit", "work"]

TIMEOUT = "timeout"
_LOADING = 120.0  # seconds in which a worker must have imported what its verifier needs
_MOST_WORKERS = 16
_MEMORY = 8 * 2**30  # bytes of a worker's address space: an expression that explodes raises MemoryError there
_GRACE = 2.0  # seconds after its limit at which a worker ends itself in case its parent is gone

Question = tuple[str, str, str, Row]  # prompt, answer, gold, row


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A reward; `error` is empty, `TIMEOUT`, or what verify raised, and then the reward is 0."""

    reward: float
    error: str = ""


def submit(task: Task, questions: Sequence[Question]) -> "concurrent.futures.Future[list[Verdict]]":
    """The verdict on every answer, in order. A quick rule has run when this returns; an isolated one is still running.

    Raises:
        ValueError: an isolated verify cannot be sent to a worker; from the result, it cannot be loaded there.
    """
    if task.isolated:
        try:
            pickled = pickle.dumps(task.verify)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"task {task.name!r} is isolated, but its verify cannot be sent to a process ({error}); make it a "
                "function of a module, or a dataclass with __call__"
            ) from error
        return _THREAD.submit(_in_workers, task.name, pickled, task.time_limit, list(questions))
    done: concurrent.futures.Future[list[Verdict]] = concurrent.futures.Future()
    done.set_result([_here(task, question) for question in questions])
    return done


def _here(task: Task, question: Question) -> Verdict:
    try:
        return Verdict(_checked(task.verify(*question)))
    except Exception as error:
        return Verdict(0.0, _described(error))


def _checked(reward: Any) -> float:
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"the reward {reward!r} is not finite; return a finite number")
    return value


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


class _Worker:
    """A process that runs one verifier with one time limit."""

    def __init__(self, time_limit: float, pickled: bytes):
        self.connection, theirs = multiprocessing.Pipe()
        # The worker can import whatever this process can, the user's own modules too.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", f"from {__name__} import work; work({theirs.fileno()}, {time_limit!r})"]
        self.process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        theirs.close()
        self.verifier = (time_limit, pickled)
        self.loaded = False
        self.question: int | None = None  # what it is busy with
        self.deadline = time.monotonic() + _LOADING
        self._send(("load", pickled))

    def ask(self, index: int, question: Question) -> None:
        self.question, self.deadline = index, time.monotonic() + self.verifier[0]
        self._send(("verify", question))

    def rest(self) -> None:
        self.question, self.deadline = None, math.inf

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()

    def _send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died; the closed connection shows it
            self.connection.send_bytes(pickle.dumps(message))


_THREAD = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="verifiers")  # the only one that talks to workers
_idle: list[_Worker] = []
_lock = threading.Lock()


def close() -> None:
    """End all workers; the next verification starts new ones."""
    with _lock:
        while _idle:
            _idle.pop().end()


atexit.register(close)


def _in_workers(name: str, pickled: bytes, time_limit: float, questions: list[Question]) -> list[Verdict]:
    waiting = deque(range(len(questions)))
    verdicts: list[Verdict] = [Verdict(0.0)] * len(questions)
    workers = _take((time_limit, pickled))
    most = min(len(usable_cores()), _MOST_WORKERS)

    def next_question(worker: _Worker) -> None:
        if waiting:
            worker.ask(waiting[0], questions[waiting.popleft()])
        else:
            worker.rest()

    def lost(worker: _Worker, why: str) -> None:
        workers.remove(worker)
        worker.end()
        if not worker.loaded:
            raise ValueError(f"task {name!r}: a worker could not load its verify ({why}); see what it wrote above")
        if worker.question is not None:
            verdicts[worker.question] = Verdict(0.0, why)

    try:
        for worker in [worker for worker in workers if worker.loaded]:
            next_question(worker)
        while waiting or any(worker.question is not None for worker in workers):
            unanswered = len(waiting) + sum(worker.question is not None for worker in workers)
            while len(workers) < min(most, unanswered):
                workers.append(_Worker(time_limit, pickled))
            soonest = min(worker.deadline for worker in workers)
            patience = None if soonest == math.inf else max(0.0, soonest - time.monotonic())
            heard = multiprocessing.connection.wait([worker.connection for worker in workers], patience)
            for worker in [worker for worker in workers if worker.connection in heard]:
                try:
                    kind, content = worker.connection.recv()
                except (EOFError, ConnectionResetError):  # out of memory, or a crash in what the verifier calls
                    lost(worker, "the worker died")
                    continue
                if kind == "failed":
                    raise ValueError(f"task {name!r}: its verify cannot be loaded in a worker ({content})")
                worker.loaded = True
                if worker.question is not None:
                    verdicts[worker.question] = Verdict(content) if kind == "reward" else Verdict(0.0, content)
                next_question(worker)
            now = time.monotonic()
            for worker in [worker for worker in workers if worker.deadline <= now]:
                lost(worker, TIMEOUT)
        return verdicts
    finally:
        with _lock:
            for worker in workers:
                if worker.question is None:  # also one that is still loading: it is ready for the next call
                    _idle.append(worker)
                else:
                    worker.end()


def _take(verifier: tuple[float, bytes]) -> list[_Worker]:
    """The idle workers that have loaded this verifier; the others end."""
    with _lock:
        fitting = [worker for worker in _idle if worker.verifier == verifier and worker.process.poll() is None]
        for worker in _idle:
            if worker not in fitting:
                worker.end()
        _idle.clear()
    return fitting


def work(descriptor: int, time_limit: float) -> None:
    """What a worker process does until the pipe with this file descriptor closes."""
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
                reply = ("reward", _checked(verify(*content)))
            except Exception as error:
                reply = ("error", _described(error))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            connection.send(reply)
        except BrokenPipeError:
            return
