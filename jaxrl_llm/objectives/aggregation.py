"""Aggregations: a weight for every token and a count of the mask; a loss is sum(weight * x) / count, divided last."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float, PerToken
from jaxrl_llm.objectives.batch import Batch, to_tokens
from jaxrl_llm.objectives.parts import Part, hyperparameter


class Aggregation(Part):
    """Base of the aggregations; one that averages over sequences overrides `weights` alone."""

    def weights(self, batch: Batch) -> PerToken:
        """The weight of every token in the total, [b t]; anything finite where masked."""
        return jnp.ones_like(batch.logprobs)

    def count(self, tokens: Float[Array, ""], sequences: Float[Array, ""]) -> Float[Array, ""]:
        """Return the divisor of the total, from the numbers of unmasked tokens and of non-empty sequences."""
        return sequences

    def total(self, x: PerToken, batch: Batch) -> Float[Array, ""]:
        """sum_t weight_t x_t over unmasked tokens."""
        return jnp.sum(self.weights(batch) * x, where=batch.mask)


class SequenceMeanTokenMean(Aggregation):
    """mean_i 1/|y_i| sum_t x: every answer weighs alike.  Source: GRPO, arXiv 2402.03300 eq. 3."""

    equation: ClassVar[str] = "mean_y mean_t"

    def weights(self, batch: Batch) -> PerToken:
        return to_tokens(1 / jnp.maximum(batch.lengths, 1), batch.mask, batch.sequence_ids)


class TokenMean(Aggregation):
    """sum x / sum_i |y_i|: every token of the minibatch weighs alike.  Source: DAPO, arXiv 2503.14476 eq. 12."""

    equation: ClassVar[str] = "mean_yt"

    def count(self, tokens: Float[Array, ""], sequences: Float[Array, ""]) -> Float[Array, ""]:
        return tokens


class SequenceMeanTokenSum(Aggregation):
    """mean_i sum_t x: the gradient of the whole answer's log-probability."""

    equation: ClassVar[str] = "mean_y sum_t"


@dataclasses.dataclass(frozen=True)
class Constant(Aggregation):
    """mean_i sum_t x / max_length: no answer's length enters.  Source: Dr. GRPO, arXiv 2503.20783 section 3.2."""

    max_length: int | None = hyperparameter(
        None, "L_max of the constant aggregation; the answer bound unless set", least=1
    )
    equation: ClassVar[str] = "mean_y sum_t 1/{max_length}"

    def check(self, objective: Any) -> None:
        if self.max_length is None:
            raise ValueError("max_length=None: give the longest answer in tokens (as rollout.max_new_tokens)")

    def weights(self, batch: Batch) -> PerToken:
        assert self.max_length is not None  # `check` has seen to it
        return jnp.full_like(batch.logprobs, 1 / self.max_length)


AGGREGATIONS: dict[str, type[Aggregation]] = {
    "sequence_mean_token_mean": SequenceMeanTokenMean,
    "token_mean": TokenMean,
    "sequence_mean_token_sum": SequenceMeanTokenSum,
    "constant": Constant,
}


def name_of(aggregation: Aggregation) -> str | None:
    """Its name in `AGGREGATIONS`; None of a class that is not there, a subclass of one that is included."""
    return next((name for name, kind in AGGREGATIONS.items() if type(aggregation) is kind), None)
