"""Surrogates: what is maximised at every token, un-reduced, as a function of the log ratio and the advantage.

Bounds are written as masks: exactly on a bound the gradient flows, beyond it on the bad side it is exactly 0.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Mask, PerToken
from jaxrl_llm.ground.metrics import Mean, Metric
from jaxrl_llm.ground.ranges import positive
from jaxrl_llm.objectives.batch import Batch
from jaxrl_llm.objectives.parts import Part, hyperparameter

__all__ = ["Cispo", "Clip", "GeometricMean", "LogProb", "Soft", "Surrogate", "Vespo"]

_EXAMPLES = {"token": "TokenRatio", "sequence": "SequenceRatio", "product": "SequenceProduct", "none": "NoRatio"}


@dataclasses.dataclass(frozen=True)
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
        """The quantity to maximise, [b t]. `log_ratio` comes from the ratio, advantages are `batch.advantages`."""

    def clipped(self, log_ratio: PerToken, batch: Batch) -> tuple[Mask, Mask]:
        """Tokens that a bound acts on because their ratio is too low, and too high."""
        none = jnp.zeros_like(batch.mask)
        return none, none

    def metrics(self, log_ratio: PerToken, batch: Batch) -> dict[str, Metric]:
        low, high = self.clipped(log_ratio, batch)
        return {"clip/low": Mean.of(low, batch.mask), "clip/high": Mean.of(high, batch.mask)}


@dataclasses.dataclass(frozen=True)
class LogProb(Surrogate):
    """A_t log pi(y_t).  Source: REINFORCE, Williams 1992 (doi 10.1007/BF00992696) theorem 1."""

    units: ClassVar[tuple[str, ...]] = ("none", "token", "sequence")

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return batch.advantages * jnp.where(batch.mask, batch.logprobs, 0)

    def formula(self) -> str:
        return "A log pi"


@dataclasses.dataclass(frozen=True)
class Clip(Surrogate):
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and for A < 0 at least dual_clip A.

    The gradient is 0 exactly when A > 0 and r > 1 + clip_high, A < 0 and r < 1 - clip_low, or A < 0 and r > dual_clip.

    Source: PPO, arXiv 1707.06347 eq. 7; clip_low != clip_high: DAPO, arXiv 2503.14476 eq. 10; dual clip:
    arXiv 1912.09729 eq. 5.
    """

    clip_low: float = hyperparameter(0.2, "ratio below 1 - clip_low is clipped")
    clip_high: float = hyperparameter(0.2, "ratio above 1 + clip_high is clipped")
    dual_clip: float | None = hyperparameter(None, "bound on the ratio for negative advantages, > 1; off unless set")

    def __post_init__(self) -> None:
        positive("clip_low", self.clip_low)
        positive("clip_high", self.clip_high)
        if self.dual_clip is not None:
            positive("dual_clip", self.dual_clip, above=1.0)

    def radii(self, log_ratio: PerToken, batch: Batch) -> tuple[PerToken | float, PerToken | float]:
        """How far a ratio may be below and above 1: numbers, or one per token."""
        return self.clip_low, self.clip_high

    def clipped(self, log_ratio: PerToken, batch: Batch) -> tuple[Mask, Mask]:
        ratio, good, bad = jnp.exp(log_ratio), batch.advantages > 0, batch.advantages < 0
        below, above = self.radii(log_ratio, batch)
        low, high = bad & (ratio < 1 - below), good & (ratio > 1 + above)
        return low, high if self.dual_clip is None else high | (bad & (ratio > self.dual_clip))

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        ratio = jnp.exp(log_ratio)
        low, high = self.clipped(log_ratio, batch)
        below, above = self.radii(log_ratio, batch)
        ceiling = 1 + above
        if self.dual_clip is not None:
            ceiling = jnp.where(batch.advantages < 0, self.dual_clip, ceiling)
        return batch.advantages * jnp.where(low, 1 - below, jnp.where(high, ceiling, ratio))

    def formula(self) -> str:
        bounded = f"min(r A, clip(r, {1 - self.clip_low:.6g}, {1 + self.clip_high:.6g}) A)"
        return bounded if self.dual_clip is None else f"max({bounded}, {self.dual_clip:g} A if A < 0)"


@dataclasses.dataclass(frozen=True)
class Soft(Surrogate):
    """f(r) A with f(r) = (4 / tau) sigmoid(tau (r - 1)): a gate instead of a bound; tau_pos for A > 0, else tau_neg.

    The gradient with respect to r is w(r) A with the gate w(r) = sech^2(tau (r - 1) / 2), w(1) = 1.

    Source: SAPO, arXiv 2511.20347 eqs 5-8.
    """

    tau_pos: float = hyperparameter(1.0, "SAPO's temperature for positive advantages")
    tau_neg: float = hyperparameter(1.05, "SAPO's temperature for negative advantages")

    def __post_init__(self) -> None:
        positive("tau_pos", self.tau_pos)
        positive("tau_neg", self.tau_neg)

    def _tau(self, batch: Batch) -> PerToken:
        return jnp.where(batch.advantages > 0, self.tau_pos, self.tau_neg).astype(batch.advantages.dtype)

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        tau = self._tau(batch)
        return 4 / tau * jax.nn.sigmoid(tau * jnp.expm1(log_ratio)) * batch.advantages

    def metrics(self, log_ratio: PerToken, batch: Batch) -> dict[str, Metric]:
        gate = jax.nn.sigmoid(self._tau(batch) * jnp.expm1(log_ratio))
        return super().metrics(log_ratio, batch) | {"gate/mean": Mean.of(4 * gate * (1 - gate), batch.mask)}

    def formula(self) -> str:
        return f"4/tau sigmoid(tau (r - 1)) A; tau = {self.tau_pos:g} (A > 0), {self.tau_neg:g} (A < 0)"


@dataclasses.dataclass(frozen=True)
class Cispo(Surrogate):
    """sg(min(r, cap)) A log pi: the weight is bounded, the gradient never cut; `cap` is the ratio itself, not 1 + eps.

    Source: CISPO, arXiv 2506.13585 eqs 4-5 (which does not print its bound).
    """

    cap: float = hyperparameter(5.0, "CISPO's largest ratio, absolute (not 1 + eps)")
    units: ClassVar[tuple[str, ...]] = ("token", "sequence", "none")

    def __post_init__(self) -> None:
        positive("cap", self.cap)

    def clipped(self, log_ratio: PerToken, batch: Batch) -> tuple[Mask, Mask]:
        return jnp.zeros_like(batch.mask), jnp.exp(log_ratio) > self.cap

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        weight = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio), self.cap))
        return weight * batch.advantages * jnp.where(batch.mask, batch.logprobs, 0)

    def formula(self) -> str:
        return f"sg(min(r, {self.cap:g})) A log pi"


@dataclasses.dataclass(frozen=True)
class GeometricMean(Surrogate):
    """A exp(mean_t c(log r_t)), one value an answer; c bounds log r by +log_clip if A > 0, by -log_clip if A < 0.

    Source: GMPO, arXiv 2507.20673 eq. 4 (bounds e^-0.4, e^0.4).
    """

    log_clip: float = hyperparameter(0.4, "GMPO's bound on the log-ratio")
    units: ClassVar[tuple[str, ...]] = ("token",)

    def __post_init__(self) -> None:
        positive("log_clip", self.log_clip)

    def clipped(self, log_ratio: PerToken, batch: Batch) -> tuple[Mask, Mask]:
        low = (batch.advantages < 0) & (log_ratio < -self.log_clip)
        return low, (batch.advantages > 0) & (log_ratio > self.log_clip)

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        low, high = self.clipped(log_ratio, batch)
        bounded = jnp.where(low, -self.log_clip, jnp.where(high, self.log_clip, log_ratio))
        return batch.advantages * jnp.exp(batch.per_token(batch.sequence_mean(bounded)))

    def formula(self) -> str:
        return f"A exp(mean_t c(log r)); c bounds log r at {self.log_clip:g} (A > 0), -{self.log_clip:g} (A < 0)"


@dataclasses.dataclass(frozen=True)
class Vespo(Surrogate):
    """sg(phi(W)) A log pi with phi(W) = W^c1 exp(c2 (1 - W)), computed in log space; phi(1) = 1.

    `phi_pos` and `phi_neg` are (c1, c2) for A > 0 and for A < 0.  Source: VESPO, arXiv 2602.10693.
    """

    phi_pos: tuple[float, float] = hyperparameter((2.0, 3.0), "VESPO's (c1, c2) for positive advantages")
    phi_neg: tuple[float, float] = hyperparameter((3.0, 2.0), "VESPO's (c1, c2) for negative advantages")
    units: ClassVar[tuple[str, ...]] = ("product",)

    def __post_init__(self) -> None:
        for name, pair in (("phi_pos", self.phi_pos), ("phi_neg", self.phi_neg)):
            if len(pair) != 2:
                raise ValueError(f"{name}={pair!r} is not a pair; give (c1, c2)")
            for value in pair:
                positive(name, value)

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        good = batch.advantages > 0
        power = jnp.where(good, self.phi_pos[0], self.phi_neg[0])
        decay = jnp.where(good, self.phi_pos[1], self.phi_neg[1])
        phi = jnp.exp(power * log_ratio - decay * jnp.expm1(log_ratio))
        return jax.lax.stop_gradient(phi) * batch.advantages * jnp.where(batch.mask, batch.logprobs, 0)

    def formula(self) -> str:
        (a, b), (c, d) = self.phi_pos, self.phi_neg
        return f"sg(r^c1 e^(c2 (1 - r))) A log pi; (c1, c2) = ({a:g}, {b:g}) (A > 0), ({c:g}, {d:g}) (A < 0)"
