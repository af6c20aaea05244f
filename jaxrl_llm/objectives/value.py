"""The loss of a value function."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import PerToken
from jaxrl_llm.objectives.aggregation import TokenMean
from jaxrl_llm.objectives.batch import Batch
from jaxrl_llm.objectives.parts import Part, hyperparameter


def value_loss(values: PerToken, old_values: PerToken, returns: PerToken, value_clip: float | None) -> PerToken:
    """1/2 max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) of every token, to be minimised.

    The gradient is exactly 0 where V is outside the range and the clipped branch is the larger. None means no clip.

    Source: InstructGPT's PPO (arXiv 2203.02155 appendix C); the clip: OpenAI baselines, arXiv 2005.12729 section 2.
    """
    error = (values - returns) ** 2
    if value_clip is not None:
        bounded = jax.lax.stop_gradient(jnp.clip(values, old_values - value_clip, old_values + value_clip))
        inside = jnp.abs(values - old_values) <= value_clip
        clipped = (bounded - returns) ** 2
        error = jnp.where(inside | (error >= clipped), error, clipped)
    return error / 2


@dataclasses.dataclass(frozen=True)
class ValueLoss(Part):
    """value_coef times `value_loss`, a mean over unmasked tokens."""

    value_clip: float | None = hyperparameter(0.2, "range of the clipped value loss", above=0)
    value_coef: float = hyperparameter(1.0, "weight of the value loss", least=0, below=math.inf)
    needs: ClassVar[frozenset[str]] = frozenset({"values", "old_values", "returns"})
    aggregation: ClassVar[TokenMean] = TokenMean()

    def check(self, objective: Any) -> None:
        if not objective.advantage.needs_values:
            raise ValueError(
                f"ValueLoss needs returns, which {type(objective.advantage).__name__} does not make; "
                "use Gae as the advantage or set value=None"
            )

    def __call__(self, batch: Batch) -> PerToken:
        """The loss of every token, [b t], to be minimised; 0 where masked."""
        values, old, returns = (batch.masked(name) for name in ("values", "old_values", "returns"))
        return self.value_coef * value_loss(values, old, returns, self.value_clip)
