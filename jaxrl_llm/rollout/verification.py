"""From sampled tokens to rewards."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_llm.ground import processes
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.tasks import UNKNOWN, CharTokenizer, Prompts, Task
from jaxrl_llm.tasks.verifiers import Question, Verdict, submit

VERIFIER = "verifier"  # the name of the task's own among verifiers and sources of rewards

# The texts of answers without their end, the rewards by the name of verifier or function, and {name: what went wrong}
# of each answer.
Judged = tuple[list[str], dict[str, Float[np.ndarray, "b"]], list[dict[str, str]]]
# Answers at the verifier: their tokens, EOS included, whether they were cut off, and a function that waits.
Asked = tuple[Int[np.ndarray, "b"], Bool[np.ndarray, "b"], Callable[[], Judged]]


def ask(rollout: Rollout, task: Task, prompts: Prompts, group_size: int) -> Asked:
    """Decode the answers and hand them to the verifier; an isolated one runs while the devices do other work.

    Neither it nor a reward function sees an answer that was cut off by its bound (unless `task.verify_truncated`), nor
    one of a tokenizer of characters with an id that has none: these get 0. Half a character at the end is dropped. The
    verifier sees what follows the last `task.think_end_token`, and the functions the whole answer. Each of several
    processes verifies its share.

    The function that waits is a collective; it raises ValueError where the task's verifier cannot run in a worker
    process.

    Args:
      rollout: of b answers in (prompt, sample) order.
      group_size: answers a prompt.

    Returns:
      Lengths of the answers [b], which of them hit their bound [b], and a function that waits for the verdicts and
      gives b texts, {source: rewards [b]} and the errors of each answer by source.
    """
    tokens, mask, truncated = processes.fetch((rollout.tokens, rollout.loss_mask, rollout.truncated))
    own = processes.share(len(tokens))
    texts = [task.tokenizer.decode(tokens[i][mask[i]].tolist()) for i in own]
    seen: dict[int, Question] = {}
    for place, (i, text) in enumerate(zip(own, texts, strict=True)):
        unknown = UNKNOWN in text and isinstance(task.tokenizer, CharTokenizer)
        if not unknown and (task.verify_truncated or not truncated[i]):
            group = i // group_size
            answer = text.rstrip(UNKNOWN)
            seen[place] = (prompts["prompt"][group], answer, prompts["answer"][group], prompts["row"][group])
    asked = {VERIFIER: _submitted(task, _after_thought(seen, task.think_end_token))}
    for name, (verify, isolated) in task.functions.items():
        asked[name] = _submitted(dataclasses.replace(task, verify=verify, isolated=isolated), seen)

    @functools.cache
    def wait() -> Judged:
        rows: list[list[Any]] = [[text] for text in texts]
        for places, verdicts in asked.values():
            given = dict(zip(places, verdicts.result(), strict=True))
            for place, row in enumerate(rows):
                row.append(dataclasses.astuple(given.get(place, Verdict(0.0))))
        all_texts, *named = zip(*processes.gather(rows), strict=True)
        by_name = dict(zip(asked, named, strict=True))
        rewards = {name: np.asarray([reward for reward, _ in given], np.float32) for name, given in by_name.items()}
        errors = [{name: given[i][1] for name, given in by_name.items() if given[i][1]} for i in range(len(all_texts))]
        return list(all_texts), rewards, errors

    return mask.sum(1), truncated, wait


def _after_thought(seen: Mapping[int, Question], marker: str) -> Mapping[int, Question]:
    """The questions with that of their answers which follows the last marker; those without one are left out."""
    if not marker:
        return seen
    return {
        place: (prompt, answer.rpartition(marker)[2], gold, row)
        for place, (prompt, answer, gold, row) in seen.items()
        if marker in answer
    }


def _submitted(task: Task, questions: Mapping[int, Question]) -> tuple[list[int], "Future[list[Verdict]]"]:
    return list(questions), submit(task, list(questions.values()))


def verify(rollout: Rollout, task: Task, prompts: Prompts, group_size: int) -> Judged:
    """Texts, rewards by name ("verifier" is the task's own) and errors of the answers, as `ask`; waits for them."""
    return ask(rollout, task, prompts, group_size)[2]()
