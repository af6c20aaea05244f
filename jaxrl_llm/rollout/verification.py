"""From sampled tokens to rewards."""

import concurrent.futures
import dataclasses

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_llm.rollout.trajectory import Trajectory
from jaxrl_llm.tasks import UNKNOWN, PromptBatch, Task, verifier_pool
from jaxrl_llm.tasks.verifier_pool import TIMEOUT, Verdict

__all__ = ["Answered", "Verified", "begin", "verify"]


@dataclasses.dataclass(frozen=True)
class Verified:
    """rewards [b] float32, the task's own; errors: what went wrong with the verifier of each answer, else ""."""

    rewards: Float[np.ndarray, "b"]
    errors: list[str]

    @property
    def timeouts(self) -> int:
        return sum(error == TIMEOUT for error in self.errors)

    @property
    def raised(self) -> int:
        return sum(error not in ("", TIMEOUT) for error in self.errors)


@dataclasses.dataclass(frozen=True)
class Answered:
    """The answers of a rollout as text (without the end), on their way through the verifier."""

    texts: list[str]
    lengths: Int[np.ndarray, "b"]  # tokens, the end included
    truncated: Bool[np.ndarray, "b"]
    asked: list[int]  # the answers that the verifier gets
    verdicts: "concurrent.futures.Future[list[Verdict]]"

    def finish(self) -> Verified:
        """Wait for the verifier.

        Raises:
          ValueError: the task's verifier cannot run in a worker process.
        """
        rewards, errors = np.zeros(len(self.texts), np.float32), [""] * len(self.texts)
        for i, verdict in zip(self.asked, self.verdicts.result(), strict=True):
            rewards[i], errors[i] = verdict.reward, verdict.error
        return Verified(rewards, errors)


def begin(trajectory: Trajectory, task: Task, prompts: PromptBatch, group_size: int) -> Answered:
    """Decode the answers and hand them to the verifier; an isolated one runs on while the devices do other work.

    An answer that was cut off by its bound gets 0 (unless `task.verify_truncated`), and so does one with U+FFFD in its
    text, which is an id that the tokenizer does not know or bytes that are no UTF-8: the verifier sees neither.
    """
    tokens, mask, truncated = jax.device_get((trajectory.tokens, trajectory.loss_mask, trajectory.truncated))
    texts = [task.tokenizer.decode(row[m].tolist()) for row, m in zip(tokens, mask, strict=True)]
    asked = [i for i, text in enumerate(texts) if UNKNOWN not in text and (task.verify_truncated or not truncated[i])]
    fields = list(zip(prompts["prompt"], prompts["answer"], prompts["row"], strict=True))
    questions = []
    for i in asked:
        prompt, gold, row = fields[i // group_size]
        questions.append((prompt, texts[i], gold, row))
    return Answered(texts, mask.sum(1), truncated, asked, verifier_pool.submit(task, questions))


def verify(trajectory: Trajectory, task: Task, prompts: PromptBatch, group_size: int) -> tuple[Answered, Verified]:
    """`begin` and `finish` at once."""
    answered = begin(trajectory, task, prompts, group_size)
    return answered, answered.finish()
