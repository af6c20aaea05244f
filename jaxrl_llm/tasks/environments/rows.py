"""Rows of a task with an environment: the first messages of its episodes, and demonstrations.

First messages are what `init` says to a row; they stand in the place of the row's prompt. An environment is asked once
a row where prompts are read, and every episode of that row is compared with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.tasks.base import Example, Row, Task, TooLong, bounded
from jaxrl_llm.tasks.environments.continuation import Continuation
from jaxrl_llm.tasks.environments.environment import DEMONSTRATION, Ask, Step, here, row_of
from jaxrl_llm.tasks.messages import EARLIER, GIVEN, Message

_AT_ONCE = 64  # rows whose environments are open together
_IN_WORKERS = ByName({"apart": "jaxrl_llm.tasks.environments.isolated_episodes"})


def opened(task: Task) -> Ask:
    """Return a function that plays episodes in this process, or in processes of their own if the task is isolated."""
    make: Any = task.environment
    return _IN_WORKERS["apart"](task, make) if task.isolated else here(make)


def begun(task: Task, examples: Sequence[Example]) -> list[tuple[Example, str]]:
    """Return each example as an episode of it begins, and why an episode cannot begin so ("": it can).

    The prompt and the earlier messages of an example are what `init` has returned. An example whose `init` returned
    None, or has failed, stays as it is.
    """
    ask, found = opened(task), list[tuple[Example, str]]()
    for first in range(0, len(examples), _AT_ONCE):
        some = examples[first : first + _AT_ONCE]
        steps = ask("init", {i: row_of(one) for i, one in enumerate(some)})
        ask("close", {i: None for i, step in steps.items() if not step.error})
        for one, step in zip(some, steps.values(), strict=True):
            new = _with(one, step.observation)
            found.append((new, step.error or ("" if new is one else _unreadable(task, new["prompt"], new["row"]))))
    return found


def fault(task: Task, example: Mapping[str, Any], step: Step) -> str:
    """Return why an episode of the example whose `init` said so is over, or "".

    The example's messages are those that the model has read.
    """
    *earlier, last = said = _messages(row_of(example), step.observation)
    if step.error or said == _messages({**example["row"], "prompt": example["prompt"]}):
        return step.error
    differs = f"init returned {last['content']!r:.60}, and something else before; let it follow from the row alone"
    return _unreadable(task, last["content"], {EARLIER: earlier}) or differs


def _unreadable(task: Task, prompt: str, row: Row) -> str:
    """Return why a prompt that an environment has said cannot be read, or ""."""
    try:
        bounded("prompt", prompt, task.ids_of_prompt(prompt, row), task.prompt_length)
    except ValueError as error:
        return f"what init returned cannot be read: {error}"[:500]
    return ""


def as_read(task: Task, drawn: Sequence[tuple[str, str, Row]]) -> list[tuple[str, str, Row]]:
    """Return (prompt, right answer, row) of examples as their episodes begin."""
    examples = [Example(uid=0, prompt=prompt, answer=answer, row=row) for prompt, answer, row in drawn]
    return [(one["prompt"], one["answer"], one["row"]) for one, _ in begun(task, examples)]


def _messages(row: Mapping[str, Any], said: Any = "") -> list[Message]:
    """Return what `init` said, or where that is nothing the earlier messages of a row and its prompt."""
    return [*said] or [*row.get(EARLIER, ()), {"role": "user", "content": row["prompt"]}]


def _with(example: Example, said: Any) -> Example:
    *earlier, last = messages = _messages(row_of(example), said)
    if messages == _messages(row_of(example)):
        return example
    row = {name: value for name, value in example["row"].items() if name != EARLIER}
    row |= ({EARLIER: earlier} if earlier else {}) | {GIVEN: row_of(example)}
    return Example(uid=example["uid"], prompt=last["content"], answer=example["answer"], row=row)


def demonstrated(task: Task, examples: Sequence[Example], length: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids of each episode, and for each 1 where it is learnt and 0 where it is read.

    The episode is `row["demonstration"]` of an example, or its right answer where there is none.

    Raises:
      TooLong: an episode has more than `length` tokens, or a prompt more than its bound.
      ValueError: the environment of an example does not begin.
    """
    between, episodes, learnt = Continuation(task), [], []
    for example, why in begun(task, examples):
        text = example["prompt"]
        if why:
            raise ValueError(f"the environment of task {task.name!r} does not begin with {text!r:.60}: {why}; mend it")
        prompt = bounded("prompt", text, task.ids_of_prompt(text, example["row"]), task.prompt_length)
        said = example["row"].get(DEMONSTRATION) or [example["answer"]]
        ids, mask = list(prompt), [0] * len(prompt)
        for i, text in enumerate(said):
            more = between.ids(text, ended=True) if i % 2 else task.ids_of_answer(text)
            ids, mask = ids + more, mask + [1 - i % 2] * len(more)
        if len(ids) > length:
            raise TooLong(f"the demonstration of {example['prompt']!r:.60} has {len(ids)} tokens, over {length}")
        episodes.append(ids)
        learnt.append(mask)
    return episodes, learnt
