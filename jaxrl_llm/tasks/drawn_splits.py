"""The examples of a task: drawn deterministically, with no prompt in both train and test, or those of a data set."""

import dataclasses
import json

import numpy as np

from jaxrl_llm.tasks.base import Example, Row, Task, TooLong, bounded, users_code
from jaxrl_llm.tasks.environments.environment import DEMONSTRATION
from jaxrl_llm.tasks.splits import SEED, is_test, parts

_PATIENCE = 20_000  # draws in a row without a new example before the space counts as exhausted


@dataclasses.dataclass
class Split:
    """The examples of one split, and how many prompts were dropped because they are too long."""

    size: int  # the most examples; 0: no limit
    examples: list[Example] = dataclasses.field(default_factory=list)
    dropped: int = 0
    shortest: int = 2**31 - 1  # tokens of the shortest prompt that was dropped

    @property
    def full(self) -> bool:
        return 0 < self.size <= len(self.examples)

    def add(self, task: Task, prompt: str, answer: str, row: Row) -> bool:
        """Keep the draw, unless its prompt is too long. Returns whether it was kept."""
        length = len(task.ids_of_prompt(prompt, row))
        if length > task.prompt_length:
            self.dropped, self.shortest = self.dropped + 1, min(self.shortest, length)
            return False
        self.examples.append(Example(uid=len(self.examples), prompt=prompt, answer=answer, row=row))
        return True


def generate(task: Task) -> dict[str, Split]:
    """The train and the test split, the same on every machine.

    A hash of a drawn prompt decides its split, so a prompt of the test split is in no train split of the same task, at
    any size. No prompt is drawn twice; that of an environment is, with another row. A data set keeps its own splits.

    Raises:
        ValueError: the task has too few different prompts or none that is short enough, or it draws an example that
          does not fit or is not right by its own rule.
    """
    splits = {"train": Split(task.train_size), "test": Split(task.test_size)}
    if task.source is None:
        _draw(task, splits)
    else:
        draws = task.source.read()
        for name, split in splits.items():
            for draw in draws[name]:
                split.add(task, *parts(task, draw))
                if split.full:
                    break
    for name, split in splits.items():
        if not split.examples:
            reason = (
                f"the shortest of its {split.dropped} prompts has {split.shortest} tokens, over prompt_length="
                f"{task.prompt_length}; raise prompt_length"
                if split.dropped
                else f"it has no row; give it some (its options: {dict(task.options)})"
            )
            raise ValueError(f"task {task.name!r} has an empty {name} split: {reason}")
    return splits


def _draw(task: Task, splits: dict[str, Split]) -> None:
    """Fill the splits."""
    assert task.sample is not None
    rng = np.random.default_rng(SEED)
    seen: set[str] = set()
    useless = 0
    while open_splits := [name for name, split in splits.items() if not split.full]:
        with users_code(task.name, "sample"):
            drawn = task.sample(rng)
        prompt, answer, row = parts(task, drawn)
        posed = _posed(task, prompt, row)
        name = "test" if is_test(posed) else "train"
        kept = False
        if posed not in seen and name in open_splits:
            seen.add(posed)
            if not task.drop_long and task.environment is None:
                _check(task, prompt, answer, row)
            kept = splits[name].add(task, prompt, answer, row)
        useless = 0 if kept else useless + 1
        if useless == _PATIENCE:
            name = open_splits[0]
            available = len(splits[name].examples)
            raise ValueError(
                f"{name}_size={splits[name].size} is more than task {task.name!r} with {dict(task.options)} "
                f"holds: {available} different {name} prompts of at most {task.prompt_length} tokens were drawn; set "
                f"{name}_size <= {available} or choose options with more prompts"
            )


def _posed(task: Task, prompt: str, row: Row) -> str:
    """A text that tells examples apart: the prompt, and what an environment keeps from the model beside it."""
    if task.environment is None:
        return prompt
    return json.dumps([prompt, {name: value for name, value in row.items() if name != DEMONSTRATION}], sort_keys=True)


def _check(task: Task, prompt: str, answer: str, row: Row) -> None:
    """Raises ValueError unless a drawn example fits its bounds and its answer is right by the task's own rule."""
    try:
        bounded("prompt", prompt, task.ids_of_prompt(prompt, row), task.prompt_length)
        bounded("answer", answer, task.ids_of_answer(answer), task.answer_length)
    except TooLong as error:
        raise ValueError(f"task {task.name!r} drew an example that does not fit: {error}") from error
    with users_code(task.name, "verify"):
        given = task.verify(prompt, answer, answer, row)
    try:
        reward = float(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"task {task.name!r}: verify returned {given!r:.60}; return a number") from error
    if not reward >= task.solved:
        raise ValueError(
            f"task {task.name!r} drew the answer {answer!r} to {prompt!r}, which its own verify scores {reward}, "
            f"below solved={task.solved}; correct sample or verify"
        )
