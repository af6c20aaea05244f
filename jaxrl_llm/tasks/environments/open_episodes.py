"""Episodes that are open, in this process or in processes of their own."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.worker_errors import described
from jaxrl_llm.tasks.base import Task
from jaxrl_llm.tasks.environments.environment import Asked, Environment, Step, told

_IN_WORKERS = ByName({"OpenApart": "jaxrl_llm.tasks.environments.isolated_episodes"})


@runtime_checkable
class Open(Protocol):
    """Episodes that are open, each with a number of its own."""

    def ask(self, asked: Sequence[Asked]) -> list[Step]:
        """Return what every environment says; one that fails says so in `Step.error`."""
        ...


class OpenHere:
    """Episodes in this process, without limits."""

    def __init__(self, make: Callable[[], Environment]):
        self._make, self._open = make, dict[int, Environment]()

    def ask(self, asked: Sequence[Asked]) -> list[Step]:
        return [self._one(*one) for one in asked]

    def _one(self, number: int, what: str, given: Any) -> Step:
        try:
            if what == "init":
                self._open[number] = self._make()
            return told(self._open[number], what, given)
        except Exception as error:
            return Step(error=described(error))


def opened(task: Task) -> Open:
    """No episode yet: they will be in this process, or in processes of their own if the task is isolated."""
    assert task.environment is not None
    return _IN_WORKERS["OpenApart"](task) if task.isolated else OpenHere(task.environment)
