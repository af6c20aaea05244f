"""Episodes for supervised training: the answers are learnt, the observations between them are read."""

from collections.abc import Sequence

from jaxrl_llm.tasks.base import Example, Task, TooLong, bounded
from jaxrl_llm.tasks.environments.continuation import Continuation
from jaxrl_llm.tasks.environments.environment import DEMONSTRATION
from jaxrl_llm.tasks.environments.first_messages import begun


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
