"""Episodes for supervised training: the answers are learnt, the observations between them are read."""

from collections.abc import Sequence

from jaxrl_llm.tasks.base import Example, Task, TooLong
from jaxrl_llm.tasks.environments.continuation import Continuation
from jaxrl_llm.tasks.environments.environment import DEMONSTRATION


def demonstrated(
    task: Task, examples: Sequence[Example], prompts: Sequence[list[int]], length: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids of each episode, and for each 1 where it is learnt and 0 where it is read.

    The episode is `row["demonstration"]` of an example, or its right answer where there is none.

    Raises:
      TooLong: an episode has more than `length` tokens.
    """
    between, episodes, learnt = Continuation(task), [], []
    for example, prompt in zip(examples, prompts, strict=True):
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
