"""Ratios of the current policy's probabilities to the old policy's, as logarithms [b t]: functions, then the choices.

`batch` says what mask, sequence_ids and num_sequences are, and why exp of a token's log_ratio is finite.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float, Mask, PerToken
from jaxrl_llm.objectives.batch import Batch, Ids, clamp, mean_of_answer, sequence_sum, to_tokens, token_log_ratio
from jaxrl_llm.objectives.parts import Part, hyperparameter

PerExpert = Float[Array, "l b t k"]


def sequence_log_ratio(
    log_ratio: PerToken, mask: Mask, sequence_ids: Ids = None, num_sequences: int | None = None
) -> PerToken:
    """log s_i = mean_t log r_t, the same at every token of answer i; s_i = PPL_old / PPL_theta. 0 where masked.

    Source: GSPO, arXiv 2507.18071 eq. 7.
    """
    return jnp.where(mask, mean_of_answer(log_ratio, mask, sequence_ids, num_sequences), 0)


def sequence_token_log_ratio(
    log_ratio: PerToken, mask: Mask, sequence_ids: Ids = None, num_sequences: int | None = None
) -> PerToken:
    """log s_t = sg(log s_i) + log pi_t - sg(log pi_t): the value of the sequence ratio, the gradient of the token's.

    Source: GSPO-token, arXiv 2507.18071 eq. 14.
    """
    sequence = jax.lax.stop_gradient(mean_of_answer(log_ratio, mask, sequence_ids, num_sequences))
    return jnp.where(mask, sequence + (log_ratio - jax.lax.stop_gradient(log_ratio)), 0)


def sequence_product(
    log_ratio: PerToken,
    mask: Mask,
    sequence_ids: Ids = None,
    num_sequences: int | None = None,
    *,
    bound: float = 80.0,
) -> PerToken:
    """log W_i = sum_t log r_t, the log importance weight of the whole answer, clamped to +-bound; not divided by |y_i|.

    Source: VESPO, arXiv 2602.10693.
    """
    total = clamp(sequence_sum(log_ratio, mask, sequence_ids, num_sequences), bound)
    return jnp.where(mask, to_tokens(total, mask, sequence_ids), 0)


def router_shift(router_logprobs: PerExpert, old_router_logprobs: PerExpert, mask: Mask, gamma_min: float) -> PerToken:
    """log gamma_t, gamma_t = sg(max(gamma_min, exp(-mean_l mean_k |log p_theta(e) - log p_old(e)|))); 0 where masked.

    p is the softmax over all experts, e runs over the experts that pi_old used; a token whose router moved counts less.

    Source: RSPO, arXiv 2510.23027.
    """
    shift = jnp.abs(router_logprobs - old_router_logprobs).mean((0, 3))
    return jax.lax.stop_gradient(jnp.maximum(-jnp.where(mask, shift, 0), math.log(gamma_min)))


def proximal_log_ratio(log_ratio: PerToken, age: PerToken) -> PerToken:
    """log r_t = log pi - log p, log p = a log mu + (1 - a) sg(log pi), a = 1 / max(age, 1); log_ratio is log(pi / mu).

    p stands for the policy before the current one, on the straight line from mu, `age` policies ago, to pi: it is mu
    itself at age 0 and 1. The value is a log(pi / mu), the gradient that of log pi.

    Source: A-3PO, arXiv 2512.06547, read in a summary of the paper and in AReaL's documentation and code.
    """
    return log_ratio - jax.lax.stop_gradient((1 - 1 / jnp.maximum(age, 1)) * log_ratio)


class Ratio(Part, abc.ABC):
    """Base of the ratios.

    unit: what one number stands for, which a surrogate must be made for: token | sequence | product (of an answer's
      token ratios, so large that it is used as a logarithm only) | none (constant, without a gradient).
    """

    unit: ClassVar[str] = "token"

    @abc.abstractmethod
    def __call__(self, batch: Batch) -> PerToken:
        """Return the log ratio of every token.

        Args:
          batch: arrays [b t]. `batch.log_ratio` is log pi - log pi_old, 0 where masked and within +-20;
            `batch.sequences` are the arguments that the functions of `batch` on whole answers take.

        Returns:
          [b t], finite when exponentiated, 0 where masked.
        """


class NoRatio(Ratio):
    """r = 1, a constant: for surrogates that differentiate log pi itself (REINFORCE)."""

    unit: ClassVar[str] = "none"
    equation: ClassVar[str] = ""

    def __call__(self, batch: Batch) -> PerToken:
        return jnp.zeros_like(batch.log_ratio)


class TokenRatio(Ratio):
    """r_t = pi_theta(y_t | y_<t) / pi_old(y_t | y_<t).  Source: PPO, arXiv 1707.06347 section 3."""

    equation: ClassVar[str] = "r = pi / pi_old by token"

    def __call__(self, batch: Batch) -> PerToken:
        return batch.log_ratio


class SamplerRatio(Ratio):
    """r_t = pi_theta / mu, with mu the policy that the sampler recorded.  Source: DPPO, arXiv 2602.04879 eq. 11."""

    needs: ClassVar[frozenset[str]] = frozenset({"sampler_logprobs"})
    equation: ClassVar[str] = "r = pi / mu by token, mu the sampler"

    def check(self, objective: Any) -> None:
        if objective.correction is not None:
            raise ValueError(
                "correction would count the sampler's mismatch twice: this ratio is taken to the sampler's policy "
                "already; set correction=None"
            )

    def __call__(self, batch: Batch) -> PerToken:
        return token_log_ratio(batch.logprobs, batch.require("sampler_logprobs"), batch.mask)


class InterpolatedRatio(SamplerRatio):
    """`proximal_log_ratio`: to a policy between the sampler's and the current one, by the age of the token."""

    needs: ClassVar[frozenset[str]] = frozenset({"sampler_logprobs", "age"})
    equation: ClassVar[str] = (
        "r = pi / p by token; p = mu^a sg(pi)^(1 - a), mu the sampler; a = 1 / max(1, age of the token in steps)"
    )

    def __call__(self, batch: Batch) -> PerToken:
        return proximal_log_ratio(super().__call__(batch), batch.masked("age"))


class SequenceRatio(Ratio):
    """`sequence_log_ratio`: one number an answer, with gradient through the mean."""

    unit: ClassVar[str] = "sequence"
    equation: ClassVar[str] = "r = (pi(y) / pi_old(y))^(1 / |y|)"

    def __call__(self, batch: Batch) -> PerToken:
        return sequence_log_ratio(batch.log_ratio, *batch.sequences)


class AnswerRatio(Ratio):
    """`sequence_product` within +-20, so that it may be exponentiated; beyond, the gradient of the answer is 0.

    Source: RLOO off the policy, in TRL's RLOOTrainer, which does not bound it.
    """

    unit: ClassVar[str] = "sequence"
    equation: ClassVar[str] = "r = pi(y) / pi_old(y)"

    def __call__(self, batch: Batch) -> PerToken:
        return sequence_product(batch.log_ratio, *batch.sequences, bound=20.0)


class SequenceTokenRatio(Ratio):
    """`sequence_token_log_ratio`: the value of the sequence, the gradient of the token."""

    unit: ClassVar[str] = "sequence"
    equation: ClassVar[str] = "r = (pi(y) / pi_old(y))^(1 / |y|), gradient by token"

    def __call__(self, batch: Batch) -> PerToken:
        return sequence_token_log_ratio(batch.log_ratio, *batch.sequences)


class SequenceProduct(Ratio):
    """`sequence_product`: the importance weight of the whole answer."""

    unit: ClassVar[str] = "product"
    equation: ClassVar[str] = "r = pi(y) / pi_old(y)"

    def __call__(self, batch: Batch) -> PerToken:
        return sequence_product(batch.log_ratio, *batch.sequences)


@dataclasses.dataclass(frozen=True)
class RouterShift(Ratio):
    """log r_t + log gamma_t: the token ratio times the weight of `router_shift`."""

    gamma_min: float = hyperparameter(0.8, "floor of the router-shift weight", above=0, most=1)
    needs: ClassVar[frozenset[str]] = frozenset({"router_logprobs", "old_router_logprobs"})
    equation: ClassVar[str] = "r = g pi / pi_old by token; g = max({gamma_min:g}, e^-(shift of the router))"

    def __call__(self, batch: Batch) -> PerToken:
        current, old = batch.require("router_logprobs"), batch.require("old_router_logprobs")
        return batch.log_ratio + router_shift(current, old, batch.mask, self.gamma_min)
