"""Episodes that are open, in this process or in processes of their own."""

from typing import Any

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.tasks.base import Task
from jaxrl_llm.tasks.environments.environment import Ask, here

_IN_WORKERS = ByName({"apart": "jaxrl_llm.tasks.environments.isolated_episodes"})


def opened(task: Task) -> Ask:
    """Return a function that plays episodes in this process, or in processes of their own if the task is isolated."""
    make: Any = task.environment
    return _IN_WORKERS["apart"](task, make) if task.isolated else here(make)
