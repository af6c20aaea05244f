"""Rewards of answers: in this process for a task's own quick rule, in worker processes for others."""

import concurrent.futures
from collections.abc import Sequence

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.worker_errors import described
from jaxrl_llm.tasks.base import Question, Task, Verdict
from jaxrl_llm.tasks.golds import AnyRight

_WORKERS = ByName({"ask": "jaxrl_llm.tasks.verifiers.verifier_pool"})


def submit(task: Task, questions: Sequence[Question]) -> "concurrent.futures.Future[list[Verdict]]":
    """The verdict on every answer, in order. A quick rule has run when this returns; an isolated one is still running.

    Raises:
        ValueError: an isolated verify cannot be sent to a worker; from the result, it cannot be loaded there.
    """
    rule = task.verify if isinstance(task.verify, AnyRight) else AnyRight(task.verify)
    if task.isolated:
        return _WORKERS["ask"](task, rule, list(questions))
    done: concurrent.futures.Future[list[Verdict]] = concurrent.futures.Future()
    done.set_result([_here(rule, question) for question in questions])
    return done


def are_right(task: Task, questions: Sequence[Question]) -> list[bool]:
    """Return whether each answer gets at least `task.solved`, once all verdicts are there; raises as `submit`."""
    return [verdict.reward >= task.solved for verdict in submit(task, questions).result()]


def _here(rule: AnyRight, question: Question) -> Verdict:
    try:
        return Verdict(rule(*question))
    except Exception as error:
        return Verdict(0.0, described(error))
