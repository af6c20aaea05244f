"""Corrections for a sampler that is not quite the trainer: detached weights on the policy term, from pi_old / mu."""

import abc
import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Mask, PerToken
from jaxrl_llm.objectives.batch import Batch, Ids, mean_of_answer, token_log_ratio
from jaxrl_llm.objectives.parts import Part, hyperparameter


def truncated_importance(log_k: PerToken, cap: float) -> PerToken:
    """min(k, cap) with k = exp(log_k) = pi_old / mu: truncated importance sampling (TIS).

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025.
    """
    return jnp.minimum(jnp.exp(log_k), cap)


def icepop(log_k: PerToken, floor: float, cap: float) -> PerToken:
    """k = exp(log_k) = pi_old / mu if floor <= k <= cap, else 0: tokens on which the two engines disagree are dropped.

    Source: IcePop, Ling team, "Every step evolves", arXiv 2510.18855.
    """
    k = jnp.exp(log_k)
    return jnp.where((k >= floor) & (k <= cap), k, 0)


def sequence_mask(
    log_k: PerToken, cap: float, mask: Mask, sequence_ids: Ids = None, num_sequences: int | None = None
) -> PerToken:
    """1 if 1 / cap <= exp(mean_t log_k) <= cap, else 0, for a whole answer; log_k = log(pi_old / mu).

    The mean, because a threshold on the product would punish long answers. A kept answer has weight 1, as under
    seq_mean_k1 of verl; `Product` has token weights beside the mask. `batch` explains the last three arguments.
    """
    s = jnp.exp(mean_of_answer(log_k, mask, sequence_ids, num_sequences))
    return jnp.where((s >= 1 / cap) & (s <= cap), jnp.ones_like(s), 0)


def decoupled(log_k: PerToken, cap: float | None = None) -> PerToken:
    """k = exp(log_k) = pi_old / mu, with a cap 0 where k is above it: with a clip around pi_old this is decoupled PPO,

        E[ k min(r A, clip(r, 1 - low, 1 + high) A) ],   r = pi / pi_old,

    whose pi_old only says around which policy an update stays, while k r = pi / mu weighs what mu drew.

    Source: arXiv 2110.00641; AReaL, arXiv 2505.24298, whose code has the cap (behav_imp_weight_cap).
    """
    k = jnp.exp(log_k)
    return k if cap is None else jnp.where(k <= cap, k, 0)


class Correction(Part, abc.ABC):
    """Base of the corrections. A weight of 0 does not leave the count, so that counts depend on masks only."""

    needs: ClassVar[frozenset[str]] = frozenset({"sampler_logprobs"})
    prefix: ClassVar[str] = "correction_"

    @abc.abstractmethod
    def weight(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        """The weight of every token, [b t]; `log_ratio` is log(pi_old / mu), 0 where masked."""

    def __call__(self, batch: Batch) -> PerToken:
        """The detached weight of every token, [b t]."""
        log_ratio = token_log_ratio(batch.old_logprobs, batch.require("sampler_logprobs"), batch.mask)
        return jax.lax.stop_gradient(self.weight(log_ratio, batch))


@dataclasses.dataclass(frozen=True)
class Truncated(Correction):
    """`truncated_importance` weights."""

    cap: float = hyperparameter(2.0, above=0)
    equation: ClassVar[str] = "w = min(k, {cap:g}); k = pi_old / mu, mu the sampler"

    def weight(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return truncated_importance(log_ratio, self.cap)


@dataclasses.dataclass(frozen=True)
class IcePop(Correction):
    """`icepop`: weights outside [floor, cap] become 0."""

    cap: float = hyperparameter(5.0, above=1)
    floor: float = hyperparameter(0.5, above=0, most=1)
    equation: ClassVar[str] = "w = k in [{floor:g}, {cap:g}], else 0; k = pi_old / mu, mu the sampler"

    def weight(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return icepop(log_ratio, self.floor, self.cap)


@dataclasses.dataclass(frozen=True)
class SequenceMask(Correction):
    """`sequence_mask`: whole answers are kept or dropped."""

    cap: float = hyperparameter(2.0, above=1)
    equation: ClassVar[str] = "w = 1 if exp(mean_t log(pi_old / mu)) in [1/{cap:g}, {cap:g}], else 0; mu the sampler"

    def weight(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return sequence_mask(log_ratio, self.cap, *batch.sequences)


@dataclasses.dataclass(frozen=True)
class Decoupled(Correction):
    """`decoupled`: the whole weight, for a sampler that is an earlier policy; a cap drops the tokens beyond it."""

    cap: float | None = hyperparameter(None, above=0)

    def weight(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return decoupled(log_ratio, self.cap)

    def formula(self) -> str:
        kept = "" if self.cap is None else f" up to {self.cap:g}, else 0"
        return f"w = k{kept}; k = pi_old / mu, mu the sampler"


@dataclasses.dataclass(frozen=True)
class Product(Correction):
    """The product of corrections, such as a mask of answers times a weight of tokens.

    `sequence_mask*decoupled` is seq-mask-tis of NeMo-RL, `sequence_mask*tis` verl's rejection by seq_mean_k1 beside
    truncated token weights.
    """

    factors: tuple[Correction, ...]

    @property
    def needs(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset().union(*(factor.needs for factor in self.factors))

    @property
    def whole_minibatch(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(factor.whole_minibatch for factor in self.factors)

    def weight(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        weights = (factor.weight(log_ratio, batch) for factor in self.factors)
        return functools.reduce(jnp.multiply, weights)

    def formula(self) -> str:
        letters = [f"w{i}" for i, _ in enumerate(self.factors, 1)]
        formulas = (factor.formula() for factor in self.factors)
        own = (text.replace("w =", f"{w} =", 1) for w, text in zip(letters, formulas, strict=True))
        return "; ".join([f"w = {' '.join(letters)}", *dict.fromkeys("; ".join(own).split("; "))])
