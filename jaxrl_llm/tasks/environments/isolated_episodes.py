"""Episodes in processes of their own, with limits of time and memory.

One worker of a `Pool` imports the user's file once and forks a process for each episode, so that one that hangs, dies
or eats memory ends alone. A process whose episode is over takes another one.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import operator
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from jaxrl_llm.config.loading import load_module
from jaxrl_llm.ground.machine import usable_cores
from jaxrl_llm.ground.worker_errors import DIED, TIMEOUT, described
from jaxrl_llm.ground.workers import Pool
from jaxrl_llm.tasks.base import Task
from jaxrl_llm.tasks.environments.environment import Asked, Environment, Step, told

_MEMORY = 2**30  # bytes of each process
_FOREVER = 1e6  # seconds: the worker holds the limits of its own processes
_LONGEST = 2**22  # bytes of what an environment says at once
_ROLLOUTS = itertools.count()  # an evaluation has episodes while those of a thread are open

_Number = tuple[int, int]  # of a rollout and of its episode


class OpenApart:
    """Episodes of an isolated task; raises ValueError if its environment cannot be sent to, or loaded in, a process."""

    def __init__(self, task: Task):
        assert task.environment is not None
        try:
            self._host = pickle.dumps(_Host(_sendable(task.environment), task.time_limit, len(usable_cores())))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"task {task.name!r} is isolated, but its environment cannot be sent to a process ({error}); make it "
                "a class of a module"
            ) from error
        self._name, self._rollout = f"the environment of task {task.name!r}", next(_ROLLOUTS)

    def ask(self, asked: Sequence[Asked]) -> list[Step]:
        given = [((self._rollout, number), what, argument) for number, what, argument in asked]
        (reply,) = _pool().ask(self._name, self._host, _FOREVER, [(given,)])
        if reply.error:
            return [Step(error=reply.error)] * len(asked)
        return [Step(*said) for said in reply.value]


def _sendable(make: Any) -> Callable[[], Environment]:
    """The environment, by its file and its name where a config's file has it: no import finds that file by a name."""
    module = getattr(make, "__module__", "")
    return _OfFile(Path(module.removeprefix("file:")), make.__qualname__) if module.startswith("file:") else make


@dataclasses.dataclass(frozen=True)
class _OfFile:
    file: Path
    name: str

    def load(self) -> None:
        _module_of(self.file)

    def __call__(self) -> Environment:
        return operator.attrgetter(self.name)(_module_of(self.file))()


@functools.cache
def _module_of(file: Path) -> Any:
    return sys.modules.get(f"file:{file}") or load_module(file)


@functools.cache
def _pool() -> Pool:
    return Pool(1, _MEMORY)


@dataclasses.dataclass
class _Process:
    pid: int
    connection: Connection
    deadline: float = 0.0
    place: int = 0  # of what it is asked, among the others

    def end(self) -> None:
        """Kill it and what it has started."""
        self.connection.close()
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


@dataclasses.dataclass
class _Host:
    """The worker: asks at most `at_once` processes at a time, each for at most `seconds`."""

    make: Callable[[], Environment]
    seconds: float
    at_once: int
    processes: dict[_Number, _Process] = dataclasses.field(default_factory=dict)
    free: list[_Process] = dataclasses.field(default_factory=list)

    def load(self) -> None:
        """Import what the environment needs once, before a process is forked."""
        if load := getattr(self.make, "load", None):
            load()

    def __call__(self, asked: list[tuple[_Number, str, Any]]) -> list[Step]:
        known = [place for place, (number, what, _) in enumerate(asked) if what == "init" or number in self.processes]
        waiting, said = deque(known), dict[int, Step]()
        busy: list[_Process] = []
        while waiting or busy:
            while waiting and len(busy) < self.at_once:
                place = waiting.popleft()
                busy.append(self._asked(place, *asked[place]))
            patience = max(0.0, min(one.deadline for one in busy) - time.monotonic())
            heard = wait([one.connection for one in busy], patience)
            now = time.monotonic()
            for one in list(busy):
                if one.connection in heard:
                    step = _read(one.connection)
                elif one.deadline <= now:
                    step = None, TIMEOUT
                else:
                    continue
                busy.remove(one)
                found, why = step
                said[one.place] = found or Step(error=why)
                number, what, _ = asked[one.place]
                if found is None:
                    one.end()
                    del self.processes[number]
                elif what == "close" or found.error:
                    self.free.append(self.processes.pop(number))
        return [said.get(place, Step(error=DIED)) for place in range(len(asked))]

    def _asked(self, place: int, number: _Number, what: str, given: Any) -> _Process:
        if number not in self.processes:
            self.processes[number] = self.free.pop() if self.free else self._forked()
        one = self.processes[number]
        one.place, one.deadline = place, time.monotonic() + self.seconds
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died, and its end of the pipe says so
            one.connection.send((what, given))
        return one

    def _forked(self) -> _Process:
        ours, theirs = Pipe()
        if pid := os.fork():
            theirs.close()
            return _Process(pid, ours)
        try:
            os.setpgid(0, 0)
            ours.close()
            _play(self.make, theirs)
        finally:
            os._exit(1)


def _read(connection: Connection) -> tuple[Step | None, str]:
    """Return what a process said, or None and why there is nothing."""
    try:
        return Step(*json.loads(connection.recv_bytes(_LONGEST))), ""
    except EOFError:
        return None, DIED
    except OSError as error:
        said = isinstance(error, ConnectionResetError)
        return None, DIED if said else f"it said more than {_LONGEST} bytes at once"


def _play(make: Callable[[], Environment], connection: Connection) -> None:
    """One episode after the other, until the pipe closes."""
    environment: Any = None
    while True:
        try:
            what, given = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if what == "init":
                environment = make()
            said = told(environment, what, given)
        except Exception as error:
            said = Step(error=described(error))
        connection.send_bytes(json.dumps(said).encode())
