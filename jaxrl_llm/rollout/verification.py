"""From sampled tokens to rewards."""

import concurrent.futures
import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_llm.ground import processes
from jaxrl_llm.rollout.trajectory import Trajectory
from jaxrl_llm.tasks import UNKNOWN, PromptBatch, Task
from jaxrl_llm.tasks.verifiers import TIMEOUT, Verdict, submit


@dataclasses.dataclass(frozen=True)
class Verified:
    texts: list[str]  # of the answers
    rewards: Float[np.ndarray, "b"]  # float32, the task's own
    errors: list[str]  # what went wrong with the verifier, else ""

    @property
    def timeouts(self) -> int:
        return sum(error == TIMEOUT for error in self.errors)

    @property
    def raised(self) -> int:
        return sum(error not in ("", TIMEOUT) for error in self.errors)


@dataclasses.dataclass(frozen=True)
class Answered:
    """The answers of a rollout on their way through the verifier; each of several processes verifies its share."""

    lengths: Int[np.ndarray, "b"]  # tokens, the end included
    truncated: Bool[np.ndarray, "b"]
    texts: list[str]  # of this process's share, without the end
    asked: list[int]  # indices of the texts that the verifier gets
    verdicts: "concurrent.futures.Future[list[Verdict]]"

    def finish(self) -> Verified:
        """Wait for the verifiers of all processes; ValueError: the task's cannot run in a worker process."""
        own: list[tuple[str, float, str]] = [(text, 0.0, "") for text in self.texts]
        for i, verdict in zip(self.asked, self.verdicts.result(), strict=True):
            own[i] = (self.texts[i], verdict.reward, verdict.error)
        texts, rewards, errors = zip(*processes.gather(own), strict=True)
        return Verified(list(texts), np.asarray(rewards, np.float32), list(errors))


def begin(trajectory: Trajectory, task: Task, prompts: PromptBatch, group_size: int) -> Answered:
    """Decode the answers and hand them to the verifier; an isolated one runs while the devices do other work.

    It does not see an answer that was cut off by its bound (unless `task.verify_truncated`), nor one with U+FFFD in its
    text, which stands for an unknown id or for bytes that are not UTF-8: both get 0.
    """
    tokens, mask, truncated = processes.fetch((trajectory.tokens, trajectory.loss_mask, trajectory.truncated))
    own = processes.share(len(tokens))
    texts = [task.tokenizer.decode(tokens[i][mask[i]].tolist()) for i in own]
    asked = {}
    for place, (i, text) in enumerate(zip(own, texts, strict=True)):
        if UNKNOWN not in text and (task.verify_truncated or not truncated[i]):
            group = i // group_size
            asked[place] = (prompts["prompt"][group], text, prompts["answer"][group], prompts["row"][group])
    return Answered(mask.sum(1), truncated, texts, list(asked), submit(task, list(asked.values())))


def verify(trajectory: Trajectory, task: Task, prompts: PromptBatch, group_size: int) -> Verified:
    """`begin` and `finish` at once."""
    return begin(trajectory, task, prompts, group_size).finish()
