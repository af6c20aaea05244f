"""Rewards of several named sources, summed with their weights and logged apart."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Bool, PerAnswer
from jaxrl_llm.ground.metrics import Mean, Metric
from jaxrl_llm.ground.ranges import one_of

__all__ = ["weighted_rewards"]


def weighted_rewards(
    sources: Mapping[str, Any], weights: Mapping[str, float], *, where: Bool[Array, "b"] | None = None
) -> tuple[PerAnswer, dict[str, Metric]]:
    """R = sum over names of weight * source, and `reward/NAME` of every source, before its weight.

    Args:
      sources: name to rewards, arrays [b], of a verifier, a reward model or a rule on the length. One without a weight
        is logged and not summed.
      weights: name to weight; 0 and negative ones are allowed.
      where: answers that enter the metrics, all if None.

    Raises:
      ValueError: no weight, a weight for an unknown source, or sources of different shapes.
    """
    if not weights:
        raise ValueError(f"weights is empty; give at least one of {', '.join(sources)} a weight")
    for name in weights:
        one_of("reward source", name, sources)
    shapes = {name: jnp.shape(x) for name, x in sources.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"reward sources have shapes {shapes}; give each one number an answer, [b]")
    rewards = {name: jnp.asarray(x, jnp.float32) for name, x in sources.items()}
    counted = jnp.ones(next(iter(shapes.values())), bool) if where is None else where
    metrics: dict[str, Metric] = {f"reward/{name}": Mean.of(x, counted) for name, x in rewards.items()}
    total = sum((weight * rewards[name] for name, weight in weights.items()), jnp.zeros(counted.shape))
    return total, jax.lax.stop_gradient(metrics)
