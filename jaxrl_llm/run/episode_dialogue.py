"""One episode as a dialogue, piece by piece as it is sampled: answers, and observations behind "> "."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxrl_llm.ground.ranges import within
from jaxrl_llm.rollout.episodes import Table
from jaxrl_llm.rollout.streaming import as_text
from jaxrl_llm.tasks import Task, all_prompts
from jaxrl_llm.tasks.environments.environment import text_of


def dialogue(
    task: Task, data_dir: str | None, number: int, most: int, sampled: Callable[[list[int]], Iterable[int]]
) -> Iterator[str]:
    """The episode of held-out prompt `number`, and its reward.

    Args:
      most: tokens of an answer.
      sampled: the tokens of an answer to a context.

    Raises:
      ValueError: the task has no environment, or no such prompt.
    """
    if task.environment is None:
        raise ValueError(f"--episode={number}: task {task.name!r} has no environment; use --prompt")
    held = all_prompts(task, "test", data_dir=data_dir)
    within("--episode", number, 0, len(held["prompt"]) - 1)
    one: Any = {name: values[number : number + 1] for name, values in dict[str, Any](held).items()}
    table = Table(task, one, 1, most, task.tokenizer.end_ids)
    (episode,) = table.episodes
    yield f"{one['prompt'][0]}\n"
    wanted = {0: episode.context}
    while wanted:
        tokens, copies = itertools.tee(sampled(wanted[0]))
        yield from as_text(tokens, task.tokenizer)
        wanted = table.after({0: list(copies)})
        yield f"\n> {text_of(episode.turns[-1][1].observation)}\n" if wanted else "\n"
    how = f", {episode.error}" if episode.error else ", ended by a bound" if episode.cut else ""
    yield f"reward {episode.reward:g}{how}"
