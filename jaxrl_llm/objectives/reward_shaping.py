"""Rewards between their sources and the advantage, imported when a config asks for one of these."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Mask, PerAnswer, PerToken
from jaxrl_llm.objectives.advantages import group_advantages
from jaxrl_llm.objectives.rewards import token_rewards


def normalized_sum(sources: Mapping[str, Any], weights: Mapping[str, float], group_size: int) -> PerAnswer:
    """sum over names of weight * (source - mean) / (std + 1e-6) of its group: no source drowns another by its range.

    `std="batch"` of `group_advantages` then divides by the deviation over the batch, which completes GDPO.

    Source: GDPO, arXiv 2601.05242, read in TRL's code.
    """
    centred = {name: group_advantages(jnp.asarray(sources[name]), group_size=group_size) for name in weights}
    return sum((weight * centred[name] for name, weight in weights.items()), jnp.zeros(()))


def bounded(rewards: PerAnswer, shift: float = 0.0, scale: float = 1.0, clip: tuple[float, ...] = ()) -> PerAnswer:
    """scale (R + shift), then inside the two numbers of `clip` if there are any.

    Source: reward_bias, reward_scaling and reward_clip of AReaL; reward.clip_range of OpenRLHF.
    """
    rewards = scale * (rewards + shift)
    return jnp.clip(rewards, *clip) if clip else rewards


def timed_rewards(rewards: PerAnswer, earlier: PerToken, mask: Mask) -> PerToken:
    """R at the tokens that earned it: `earlier` in its place, the rest at the last token of the mask."""
    return token_rewards(rewards - jnp.sum(earlier, axis=1, where=mask), mask) + jnp.where(mask, earlier, 0)
