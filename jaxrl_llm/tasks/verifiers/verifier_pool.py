"""Rewards of answers from worker processes with limits of time and memory."""

import concurrent.futures
import functools

from jaxrl_llm.ground.machine import memory_bytes, usable_cores
from jaxrl_llm.ground.workers import Pool, pickled
from jaxrl_llm.tasks.base import Question, Task, Verdict
from jaxrl_llm.tasks.golds import AnyRight

_MOST_WORKERS = 16
# All workers together may use half of the memory. One does not start with less than the first, and gets no more than
# the second: an expression that explodes raises MemoryError there.
_LEAST_MEMORY, _MOST_MEMORY = 2**30, 8 * 2**30


def ask(task: Task, rule: AnyRight, questions: list[Question]) -> "concurrent.futures.Future[list[Verdict]]":
    """The verdicts of an isolated rule, which is still running when this returns; raises as `submit`."""
    whose = f"task {task.name!r} is isolated, but its verify"
    sent = pickled(rule, whose, "a function of a module, or a dataclass with __call__")
    return _THREAD.submit(_in_workers, task, sent, questions)


def close() -> None:
    """End all workers; the next verification starts new ones."""
    _pool().close()


_THREAD = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="verifiers")  # a run does not wait for verifiers


def _in_workers(task: Task, rule: bytes, questions: list[Question]) -> list[Verdict]:
    replies = _pool().ask(f"verify of task {task.name!r}", rule, task.time_limit, questions)
    return [Verdict(0.0, reply.error) if reply.error else Verdict(reply.value) for reply in replies]


@functools.cache
def _pool() -> Pool:
    total = memory_bytes() // 2
    most = max(1, min(len(usable_cores()), _MOST_WORKERS, total // _LEAST_MEMORY))
    return Pool(most, min(total // most, _MOST_MEMORY))
