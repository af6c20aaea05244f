"""Episodes in processes of their own, with limits of time and memory.

One worker of a `Pool` imports the user's file once and forks a process for each episode, so that one that hangs, dies
or eats memory ends alone. A process whose episode is over takes another one, unless it has failed.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import operator
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from jaxrl_llm.config.loading import load_module
from jaxrl_llm.ground.machine import usable_cores
from jaxrl_llm.ground.worker_errors import DIED, TIMEOUT
from jaxrl_llm.ground.workers import Pool, pickled
from jaxrl_llm.tasks.base import Task
from jaxrl_llm.tasks.environments.environment import Ask, Environment, Step, here

_MEMORY = 2**30  # bytes of each process
_FOREVER = 1e6  # seconds: the worker holds the limits of its own processes
_POOL = Pool(1, _MEMORY)  # whose worker starts when it is first asked
_LONGEST = 2**22  # bytes of what an environment says at once
_ROLLOUTS = itertools.count()  # an evaluation has episodes while those of a thread are open

_Number = tuple[int, int]  # of a rollout and of its episode


def apart(task: Task, make: Callable[[], Environment]) -> Ask:
    """Return a function that plays episodes in processes of their own.

    Raises:
      ValueError: the environment cannot be sent to a process; or, when it is first asked, be made there.
    """
    name, rollout = f"the environment of task {task.name!r}", next(_ROLLOUTS)
    whose = f"task {task.name!r} is isolated, but its environment"
    host = pickled(_Host(_sendable(make), task.time_limit, len(usable_cores())), whose, "a class of a module")

    def ask(what: str, given: Mapping[int, Any]) -> dict[int, Step]:
        asked = {(rollout, number): argument for number, argument in given.items()}
        (reply,) = _POOL.ask(name, host, _FOREVER, [(what, asked)])
        said = [Step(error=reply.error)] * len(given) if reply.error else [Step(*one) for one in reply.value]
        return dict(zip(given, said, strict=True))

    return ask


def _sendable(make: Any) -> Callable[[], Environment]:
    """The environment, by its file and its name where a config's file has it: no import finds that file by a name."""
    kind, _, file = getattr(make, "__module__", "").partition(":")
    return functools.partial(_made, Path(file), make.__qualname__) if kind == "file" else make


def _made(file: Path, name: str) -> Environment:
    module = sys.modules.get(f"file:{file}") or load_module(file)
    return operator.attrgetter(name)(module)()


@dataclasses.dataclass
class _Process:
    pid: int
    connection: Connection
    deadline: float = 0.0

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
        """Make an environment, so that all it imports is there before a process is forked."""
        self.make()

    def __call__(self, what: str, given: Mapping[_Number, Any]) -> list[Step]:
        said, busy = dict.fromkeys(given, Step(error=DIED)), dict[_Number, _Process]()
        waiting = deque(number for number in given if what == "init" or number in self.processes)
        while waiting or busy:
            while waiting and len(busy) < self.at_once:
                number = waiting.popleft()
                busy[number] = self._asked(number, what, given[number])
            patience = max(0.0, min(one.deadline for one in busy.values()) - time.monotonic())
            heard = wait([one.connection for one in busy.values()], patience)
            for number, one in list(busy.items()):
                if one.connection in heard or one.deadline <= time.monotonic():
                    said[number] = _read(busy.pop(number).connection)
                    if said[number].error:
                        self.processes.pop(number).end()
                    elif what == "close":
                        self.free.append(self.processes.pop(number))
        return list(said.values())

    def _asked(self, number: _Number, what: str, given: Any) -> _Process:
        if number not in self.processes:
            self.processes[number] = self.free.pop() if self.free else self._forked()
        one = self.processes[number]
        one.deadline = time.monotonic() + self.seconds
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died, and its end of the pipe says so
            one.connection.send((what, given))
        return one

    def _forked(self) -> _Process:
        ours, theirs = Pipe()
        if pid := os.fork():
            theirs.close()
            return _Process(pid, ours)
        try:  # one episode after the other, until the pipe closes
            os.setpgid(0, 0)
            ours.close()
            ask = here(self.make)
            while True:
                what, given = theirs.recv()
                theirs.send_bytes(json.dumps(ask(what, {0: given})[0]).encode())
        finally:
            os._exit(0)


def _read(connection: Connection) -> Step:
    """Return what a process said, or why there is nothing."""
    try:
        return Step(*json.loads(connection.recv_bytes(_LONGEST))) if connection.poll() else Step(error=TIMEOUT)
    except (EOFError, ConnectionResetError):
        return Step(error=DIED)
    except OSError:
        return Step(error=f"it said more than {_LONGEST} bytes at once")
