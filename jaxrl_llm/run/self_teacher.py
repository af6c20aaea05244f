"""The policy as its own teacher: it scores its answers with the right answer in its context (experimental)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground import processes, sharding
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.run.settings import Settings
from jaxrl_llm.training.collect import Draw
from jaxrl_llm.training.layout import Layout, epochs_of
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.step import Learner


@dataclasses.dataclass(frozen=True)
class SelfTeacher:
    """The policy of the step, whose prompt begins with a text that holds the right answer.

    Source: OPSD, arXiv 2601.18734, as verl#6909 describes it: its variant with the weights of the step. The default
    there is a frozen copy of the start.
    """

    settings: Settings
    path: str = "self"
    identity: str = "self"
    parts: tuple[Any, ...] = ()  # no model beside the policy
    params: Any = None
    shapes: Any = None
    place: str = "the policy with the answer in its context"

    @classmethod
    def find(cls, s: Settings, mesh: Any = None, path: str = "") -> "SelfTeacher":
        return cls(s)

    def load(self) -> "SelfTeacher":
        return self

    def scored(
        self, learner: Learner, rollout: Rollout, layouts: Sequence[Layout], draw: Draw, policy: Policy
    ) -> Rollout:
        """The rollout with the log-probs of its tokens behind the hint; the longer rows are cut anew.

        Raises:
          ValueError: the tokenizer has no ids for a hint.
        """
        s, ((prompts, _),) = self.settings, draw.asked
        ids = [s.task.tokenizer.encode(s.teacher.hint.format(answer=answer)) for answer in prompts["answer"]]
        hints = [own for own in ids for _ in range(draw.group_size)]
        given = processes.fetch((rollout.tokens, rollout.segment_ids, rollout.loss_mask))
        fronts = hints, [[1] * len(own) for own in hints], [[False] * len(own) for own in hints]
        tokens, held, mask = (_behind(x, front) for x, front in zip(given, fronts, strict=True))
        cuts = epochs_of(held, mask, draw.group_size, s.answer_length, s.updates, seed=s.seed, step=0)[0]
        shifts = np.asarray([[len(own)] for own in hints], np.int32)
        *placed, shifts = sharding.put_rows((tokens, held, mask, shifts), learner.model.mesh)
        found = learner.score(policy, Rollout(*placed), cuts, {"logprobs"})["logprobs"]
        places = shifts + jnp.arange(rollout.tokens.shape[1])[None]
        return rollout.replace(teacher_logprobs=jnp.take_along_axis(found, places, axis=1))


def _behind(x: np.ndarray, fronts: Sequence[Sequence[int]]) -> np.ndarray:
    """Each row of x behind its front, with zeros up to a multiple of eight places more, so that few programs serve."""
    width = -8 * (-max(map(len, fronts)) // 8)
    out = np.zeros((len(x), width + x.shape[1]), x.dtype)
    for row, front, own in zip(out, fronts, x, strict=True):
        row[: len(front)], row[len(front) : len(front) + len(own)] = front, own
    return out
