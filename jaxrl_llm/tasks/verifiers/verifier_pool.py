"""Rewards of answers: in this process for a task's own quick rule, in worker processes with a time limit for others."""

import concurrent.futures
import dataclasses
import functools
import math
import pickle
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.ground.machine import memory_bytes, usable_cores
from jaxrl_llm.ground.workers import Pool, described
from jaxrl_llm.tasks.base import Row, Task, Verify

_MOST_WORKERS = 16
# All workers together may use half of the memory. One does not start with less than the first, and gets no more than
# the second: an expression that explodes raises MemoryError there.
_LEAST_MEMORY, _MOST_MEMORY = 2**30, 8 * 2**30

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
    rule = _Rule(task.verify)
    if task.isolated:
        try:
            pickled = pickle.dumps(rule)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"task {task.name!r} is isolated, but its verify cannot be sent to a process ({error}); make it a "
                "function of a module, or a dataclass with __call__"
            ) from error
        return _THREAD.submit(_in_workers, task, pickled, list(questions))
    done: concurrent.futures.Future[list[Verdict]] = concurrent.futures.Future()
    done.set_result([_here(rule, question) for question in questions])
    return done


def close() -> None:
    """End all workers; the next verification starts new ones."""
    _pool().close()


@dataclasses.dataclass(frozen=True)
class _Rule:
    """A verify whose rewards are finite numbers."""

    verify: Verify

    def load(self) -> None:
        if load := getattr(self.verify, "load", None):
            load()

    def __call__(self, *question: Any) -> float:
        reward = self.verify(*question)
        value = float(reward)
        if not math.isfinite(value):
            raise ValueError(f"the reward {reward!r} is not finite; return a finite number")
        return value


def _here(rule: _Rule, question: Question) -> Verdict:
    try:
        return Verdict(rule(*question))
    except Exception as error:
        return Verdict(0.0, described(error))


_THREAD = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="verifiers")  # a run does not wait for verifiers


def _in_workers(task: Task, pickled: bytes, questions: list[Question]) -> list[Verdict]:
    replies = _pool().ask(f"verify of task {task.name!r}", pickled, task.time_limit, questions)
    return [Verdict(0.0, reply.error) if reply.error else Verdict(reply.value) for reply in replies]


@functools.cache
def _pool() -> Pool:
    total = memory_bytes() // 2
    most = max(1, min(len(usable_cores()), _MOST_WORKERS, total // _LEAST_MEMORY))
    return Pool(most, min(total // most, _MOST_MEMORY))
