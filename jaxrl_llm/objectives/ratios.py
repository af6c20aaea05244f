"""Ratios of the current policy's probabilities to the old policy's. Each returns log ratios [b t].

Every ratio starts from the masked, clamped token log-ratio `batch.log_ratio`, so that exp of it is finite.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import PerToken
from jaxrl_llm.ground.ranges import positive
from jaxrl_llm.objectives.batch import Batch, clamp
from jaxrl_llm.objectives.parts import Part, hyperparameter

__all__ = [
    "NoRatio",
    "Ratio",
    "RouterShift",
    "SamplerRatio",
    "SequenceProduct",
    "SequenceRatio",
    "SequenceTokenRatio",
    "TokenRatio",
]


@dataclasses.dataclass(frozen=True)
class Ratio(Part, abc.ABC):
    """Base of the ratios.

    unit: what one number stands for, which a surrogate must be made for: token | sequence | product (of an answer's
      token ratios, so large that it is used as a logarithm only) | none (constant, without a gradient).
    """

    unit: ClassVar[str] = "token"

    @abc.abstractmethod
    def __call__(self, batch: Batch) -> PerToken:
        """log ratio of every token, [b t]; 0 where masked."""


@dataclasses.dataclass(frozen=True)
class NoRatio(Ratio):
    """r = 1, a constant: for surrogates that differentiate log pi itself (REINFORCE)."""

    unit: ClassVar[str] = "none"

    def __call__(self, batch: Batch) -> PerToken:
        return jnp.zeros_like(batch.log_ratio)

    def formula(self) -> str:
        return ""


@dataclasses.dataclass(frozen=True)
class TokenRatio(Ratio):
    """r_t = pi_theta(y_t | y_<t) / pi_old(y_t | y_<t).  Source: PPO, arXiv 1707.06347 section 3."""

    def __call__(self, batch: Batch) -> PerToken:
        return batch.log_ratio

    def formula(self) -> str:
        return "r = pi / pi_old by token"


@dataclasses.dataclass(frozen=True)
class SamplerRatio(Ratio):
    """r_t = pi_theta(y_t | y_<t) / mu(y_t | y_<t), with mu the policy that the sampler recorded.

    Equals the token ratio where sampler and trainer compute the same; elsewhere it includes their mismatch, so a
    sampler correction would count it twice.

    Source: DPPO, arXiv 2602.04879 eq. 11.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"sampler_logprobs"})

    def check(self, objective: Any) -> None:
        if objective.correction is not None:
            raise ValueError(
                "correction would count the sampler's mismatch twice: this ratio is taken to the sampler's policy "
                "already; set correction=None"
            )

    def __call__(self, batch: Batch) -> PerToken:
        return batch.safe(batch.logprobs - batch.require("sampler_logprobs"))

    def formula(self) -> str:
        return "r = pi / mu by token, mu the sampler"


@dataclasses.dataclass(frozen=True)
class SequenceRatio(Ratio):
    """log s_i = mean_t log r_t, one number an answer, gradient through the mean; s_i = PPL_old / PPL_theta.

    Source: GSPO, arXiv 2507.18071 eq. 7.
    """

    unit: ClassVar[str] = "sequence"

    def __call__(self, batch: Batch) -> PerToken:
        return jnp.where(batch.mask, batch.per_token(batch.sequence_mean(batch.log_ratio)), 0)

    def formula(self) -> str:
        return "r = (pi(y) / pi_old(y))^(1 / |y|)"


@dataclasses.dataclass(frozen=True)
class SequenceTokenRatio(Ratio):
    """log s_t = sg(log s_i) + log pi_t - sg(log pi_t): the value of the sequence, the gradient of the token.

    Source: GSPO-token, arXiv 2507.18071 eq. 14.
    """

    unit: ClassVar[str] = "sequence"

    def __call__(self, batch: Batch) -> PerToken:
        token = batch.log_ratio
        sequence = batch.per_token(batch.sequence_mean(token))
        return jnp.where(batch.mask, jax.lax.stop_gradient(sequence) + (token - jax.lax.stop_gradient(token)), 0)

    def formula(self) -> str:
        return "r = (pi(y) / pi_old(y))^(1 / |y|), gradient by token"


@dataclasses.dataclass(frozen=True)
class SequenceProduct(Ratio):
    """log W_i = sum_t log r_t, the importance weight of the whole answer (no length normalisation), clamped to +-80.

    Source: VESPO, arXiv 2602.10693.
    """

    unit: ClassVar[str] = "product"

    def __call__(self, batch: Batch) -> PerToken:
        return jnp.where(batch.mask, batch.per_token(clamp(batch.per_sequence(batch.log_ratio), 80.0)), 0)

    def formula(self) -> str:
        return "r = pi(y) / pi_old(y)"


@dataclasses.dataclass(frozen=True)
class RouterShift(Ratio):
    """log r_t + log gamma_t, gamma_t = sg(max(gamma_min, exp(-mean_l mean_k |log p_theta(e) - log p_old(e)|))).

    p is the softmax over all experts, e runs over the experts that pi_old used: a token whose router has moved counts
    less. Needs the router's log-probabilities at those experts, [l b t k], current and old.

    Source: RSPO, arXiv 2510.23027.
    """

    gamma_min: float = hyperparameter(0.8, "floor of the router-shift weight")
    needs: ClassVar[frozenset[str]] = frozenset({"router_logprobs", "old_router_logprobs"})

    def __post_init__(self) -> None:
        positive("gamma_min", self.gamma_min, at_most=1.0)

    def __call__(self, batch: Batch) -> PerToken:
        shift = jnp.abs(batch.require("router_logprobs") - batch.require("old_router_logprobs")).mean((0, 3))
        log_gamma = jnp.maximum(-jnp.where(batch.mask, shift, 0), math.log(self.gamma_min))
        return batch.log_ratio + jax.lax.stop_gradient(log_gamma)

    def formula(self) -> str:
        return f"r = g pi / pi_old by token; g = max({self.gamma_min:g}, e^-(shift of the router))"
