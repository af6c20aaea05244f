"""Rollouts whose last answer of each group is greedy: it is judged as the others are, and nothing is learnt from it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxrl_llm import tasks
from jaxrl_llm.ground.array_typing import Mask
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.training import collect
from jaxrl_llm.training.rollouts import Rollouts


@dataclasses.dataclass(frozen=True)
class GreedyRollouts(Rollouts):
    """A `Source` of groups with a greedy answer: ReMax's baseline, from one rollout."""

    def _verifying(self, answers: Rollout, batch: tasks.Prompts, moved: dict[str, float]) -> collect.Draw:
        draw = super()._verifying(answers, batch, moved)
        mask = _without_last(answers.loss_mask, self.engine.group_size)
        return dataclasses.replace(draw, rollout=answers.replace(loss_mask=mask))


@functools.partial(jax.jit, static_argnums=1)
def _without_last(mask: Mask, group_size: int) -> Mask:
    return mask & (jnp.arange(len(mask)) % group_size < group_size - 1)[:, None]
