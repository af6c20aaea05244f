"""Surrogates: what is maximised at every token, [b t], from log ratio and advantage: functions, then the choices.

Bounds are written as masks: exactly on a bound the gradient flows, beyond it on the bad side it is exactly 0.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Mask, PerToken
from jaxrl_llm.ground.metrics import Mean, Metric
from jaxrl_llm.objectives.batch import Batch, Ids, mean_of_answer
from jaxrl_llm.objectives.parts import Part, hyperparameter

Bound = PerToken | float


def policy_gradient(logprobs: PerToken, advantages: PerToken) -> PerToken:
    """A_t log pi(y_t).  Source: REINFORCE, Williams 1992 (doi 10.1007/BF00992696) theorem 1."""
    return advantages * logprobs


def clipped(
    ratio: PerToken, advantages: PerToken, low: Bound, high: Bound, dual_clip: float | None = None
) -> tuple[Mask, Mask]:
    """Tokens that are cut, below (A < 0, r < low) and above (A > 0, r > high; A < 0, r > dual_clip)."""
    too_low, too_high = (advantages < 0) & (ratio < low), (advantages > 0) & (ratio > high)
    return too_low, too_high if dual_clip is None else too_high | ((advantages < 0) & (ratio > dual_clip))


def clip(
    log_ratio: PerToken, advantages: PerToken, low: Bound, high: Bound, dual_clip: float | None = None
) -> PerToken:
    """min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 at least dual_clip A, with r = exp(log_ratio).

    The gradient is 0 exactly when A > 0 and r > 1 + high, A < 0 and r < 1 - low, or A < 0 and r > dual_clip. low and
    high are numbers, or [b t]; dual_clip is above 1, or None.

    Source: PPO, arXiv 1707.06347 eq. 7; low != high: DAPO, arXiv 2503.14476 eq. 10; dual clip: arXiv 1912.09729 eq. 5.
    """
    ratio = jnp.exp(log_ratio)
    too_low, too_high = clipped(ratio, advantages, 1 - low, 1 + high, dual_clip)
    ceiling = 1 + high if dual_clip is None else jnp.where(advantages < 0, dual_clip, 1 + high)
    return advantages * jnp.where(too_low, 1 - low, jnp.where(too_high, ceiling, ratio))


def soft_gate(log_ratio: PerToken, advantages: PerToken, tau_pos: float, tau_neg: float) -> PerToken:
    """(4 / tau) sigmoid(tau (r - 1)) A with tau = tau_pos for A > 0, else tau_neg: a gate instead of a bound.

    The gradient with respect to r is w(r) A with the gate w(r) = sech^2(tau (r - 1) / 2), so w(1) = 1.

    Source: SAPO, arXiv 2511.20347 eqs 5-8.
    """
    tau = _temperature(advantages, tau_pos, tau_neg)
    return 4 / tau * jax.nn.sigmoid(tau * jnp.expm1(log_ratio)) * advantages


def _temperature(advantages: PerToken, tau_pos: float, tau_neg: float) -> PerToken:
    return jnp.where(advantages > 0, tau_pos, tau_neg).astype(advantages.dtype)


def cispo(log_ratio: PerToken, logprobs: PerToken, advantages: PerToken, cap: float, floor: float = 0.0) -> PerToken:
    """sg(min(r, cap)) A log pi: the weight is bounded, the gradient never cut; `cap` is the ratio itself, not 1 + eps.

    floor: least weight, which verl, SkyRL, NeMo-RL and slime have; 0: none.

    Source: CISPO, arXiv 2506.13585 eqs 4-5 (which does not print its bound).
    """
    weight = jnp.minimum(jnp.exp(log_ratio), cap)
    return jax.lax.stop_gradient(jnp.maximum(weight, floor) if floor else weight) * advantages * logprobs


def geometric_mean(
    log_ratio: PerToken,
    advantages: PerToken,
    log_clip: float,
    mask: Mask,
    sequence_ids: Ids = None,
    num_sequences: int | None = None,
) -> PerToken:
    """A exp(mean_t c(log r_t)), one value an answer; c bounds log r by +log_clip if A > 0, by -log_clip if A < 0.

    `batch` says what the last three arguments are.  Source: GMPO, arXiv 2507.20673 eq. 4 (bounds e^-0.4, e^0.4).
    """
    low, high = clipped(log_ratio, advantages, -log_clip, log_clip)
    bounded = jnp.where(low, -log_clip, jnp.where(high, log_clip, log_ratio))
    return advantages * jnp.exp(mean_of_answer(bounded, mask, sequence_ids, num_sequences))


_EXAMPLES = {"token": "TokenRatio", "sequence": "SequenceRatio", "product": "SequenceProduct", "none": "NoRatio"}


class Surrogate(Part, abc.ABC):
    """Base of the surrogates. A user's own needs `__call__` alone.

    units: the units of ratio (see `Ratio`) that it is made for. "none" only where log pi itself is differentiated.
    """

    units: ClassVar[tuple[str, ...]] = ("token", "sequence")

    def check(self, objective: Any) -> None:
        ratio = objective.ratio
        if ratio.unit not in self.units:
            raise ValueError(
                f"{type(self).__name__} with {type(ratio).__name__}: the surrogate takes a ratio of unit "
                f"{' or '.join(self.units)}, the ratio has unit {ratio.unit}; use {_EXAMPLES[self.units[0]]}"
            )

    @abc.abstractmethod
    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        """Return the quantity to maximise at every token.

        Args:
          log_ratio: [b t], what the ratio returned; 0 where masked.
          batch: arrays [b t]. `batch.advantages` is 0 where masked; `batch.logprobs` may be NaN there, so read
            `batch.masked("logprobs")`.

        Returns:
          [b t], un-reduced. Masked tokens are dropped by the aggregation.
        """

    def clipped(self, log_ratio: PerToken, batch: Batch) -> tuple[Mask, Mask]:
        """Tokens that a bound acts on because their ratio is too low, and too high."""
        none = jnp.zeros_like(batch.mask)
        return none, none

    def metrics(self, log_ratio: PerToken, batch: Batch) -> dict[str, Metric]:
        low, high = self.clipped(log_ratio, batch)
        return {"clip/low": Mean.of(low, batch.mask), "clip/high": Mean.of(high, batch.mask)}


class LogProb(Surrogate):
    """`policy_gradient`: REINFORCE's, with or without a ratio."""

    units: ClassVar[tuple[str, ...]] = ("none", "token", "sequence")
    equation: ClassVar[str] = "A log pi"

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return policy_gradient(batch.masked("logprobs"), batch.advantages)


@dataclasses.dataclass(frozen=True)
class Clip(Surrogate):
    """`clip` with the range clip_low, clip_high."""

    clip_low: float = hyperparameter(0.2, "ratio below 1 - clip_low is clipped", above=0)
    clip_high: float = hyperparameter(0.2, "ratio above 1 + clip_high is clipped", above=0)
    dual_clip: float | None = hyperparameter(
        None, "bound on the ratio for negative advantages, > 1; off unless set", above=1
    )

    def radii(self, log_ratio: PerToken, batch: Batch) -> tuple[Bound, Bound]:
        """How far a ratio may be below and above 1: numbers, or one per token."""
        return self.clip_low, self.clip_high

    def clipped(self, log_ratio: PerToken, batch: Batch) -> tuple[Mask, Mask]:
        below, above = self.radii(log_ratio, batch)
        return clipped(jnp.exp(log_ratio), batch.advantages, 1 - below, 1 + above, self.dual_clip)

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return clip(log_ratio, batch.advantages, *self.radii(log_ratio, batch), self.dual_clip)

    def formula(self) -> str:
        bounded = f"min(r A, clip(r, {1 - self.clip_low:.6g}, {1 + self.clip_high:.6g}) A)"
        return bounded if self.dual_clip is None else f"max({bounded}, {self.dual_clip:g} A if A < 0)"


@dataclasses.dataclass(frozen=True)
class Soft(Surrogate):
    """`soft_gate` with one temperature for each sign of the advantage."""

    tau_pos: float = hyperparameter(1.0, "SAPO's temperature for positive advantages", above=0)
    tau_neg: float = hyperparameter(1.05, "SAPO's temperature for negative advantages", above=0)
    equation: ClassVar[str] = "4/tau sigmoid(tau (r - 1)) A; tau = {tau_pos:g} (A > 0), {tau_neg:g} (A < 0)"

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return soft_gate(log_ratio, batch.advantages, self.tau_pos, self.tau_neg)

    def metrics(self, log_ratio: PerToken, batch: Batch) -> dict[str, Metric]:
        gate = jax.nn.sigmoid(_temperature(batch.advantages, self.tau_pos, self.tau_neg) * jnp.expm1(log_ratio))
        return super().metrics(log_ratio, batch) | {"gate/mean": Mean.of(4 * gate * (1 - gate), batch.mask)}


@dataclasses.dataclass(frozen=True)
class Cispo(Surrogate):
    """`cispo`: the weight is bounded at `cap`, the gradient never cut."""

    cap: float = hyperparameter(5.0, "CISPO's largest ratio, absolute (not 1 + eps)", above=0)
    floor: float = hyperparameter(0.0, "CISPO's least ratio, absolute; 0: none, as in the paper", least=0, most=1)
    units: ClassVar[tuple[str, ...]] = ("token", "sequence", "none")

    def clipped(self, log_ratio: PerToken, batch: Batch) -> tuple[Mask, Mask]:
        return jnp.exp(log_ratio) < self.floor, jnp.exp(log_ratio) > self.cap

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return cispo(log_ratio, batch.masked("logprobs"), batch.advantages, self.cap, self.floor)

    def formula(self) -> str:
        bounded = f"min(r, {self.cap:g})"
        return f"sg({f'max({bounded}, {self.floor:g})' if self.floor else bounded}) A log pi"


@dataclasses.dataclass(frozen=True)
class GeometricMean(Surrogate):
    """`geometric_mean` of the ratios of an answer, each bounded on its bad side."""

    log_clip: float = hyperparameter(0.4, "GMPO's bound on the log-ratio", above=0)
    units: ClassVar[tuple[str, ...]] = ("token",)
    equation: ClassVar[str] = "A exp(mean_t c(log r)); c bounds log r at {log_clip:g} (A > 0), -{log_clip:g} (A < 0)"

    def clipped(self, log_ratio: PerToken, batch: Batch) -> tuple[Mask, Mask]:
        return clipped(log_ratio, batch.advantages, -self.log_clip, self.log_clip)

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return geometric_mean(log_ratio, batch.advantages, self.log_clip, *batch.sequences)
