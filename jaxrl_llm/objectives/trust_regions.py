"""Surrogates with a trust region other than the fixed clip: contracted by the batch, or made of a divergence."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Mask, PerToken
from jaxrl_llm.ground.ranges import one_of, positive, within
from jaxrl_llm.objectives.batch import Batch
from jaxrl_llm.objectives.parts import hyperparameter
from jaxrl_llm.objectives.surrogates import Clip, Surrogate

__all__ = ["DivergenceMask", "StalenessClip"]


@dataclasses.dataclass(frozen=True)
class StalenessClip(Clip):
    """A clip whose range is contracted where |log r| lies in the tail of the minibatch, with d = sg(log r):

        q = quantile(|d|, tail) over unmasked tokens,   c_t = 1 / (1 + (|d_t| / q)^2) if |d_t| > q > 0, else 1,
        bounds 1 - c_t clip_low and 1 + c_t clip_high.

    As 1 - c clip_low only binds below ratio 1 and 1 + c clip_high only above, this contracts the one bound that the
    token moves towards, and never hinders a token on its way back to ratio 1. `dual_clip` is left as it is.

    q is one number for all tokens of a minibatch, so the minibatch may not be cut into micro-batches. tail = 1 is the
    plain clip.

    Source: SAT, arXiv 2607.18722 section 4: detached log-ratio, quantile 0.9 of the batch, a Hill kernel of exponent 2
    and the contraction of one endpoint, read in descriptions of the paper, not in its text. The normalisation of the
    kernel is a choice made here: the Hill function of |d| / q, which is 1/2 at the quantile.
    """

    tail: float = hyperparameter(0.9, "SAT: the clip range is contracted beyond this quantile of abs(log r)")
    whole_minibatch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        within("tail", self.tail, 0.0, 1.0)

    def radii(self, log_ratio: PerToken, batch: Batch) -> tuple[PerToken, PerToken]:
        size = jnp.abs(jax.lax.stop_gradient(log_ratio))
        q = jnp.nanquantile(jnp.where(batch.mask, size, jnp.nan), self.tail)  # NaN if empty: nothing is above it
        beyond = (size > q) & (q > 0)
        c = jnp.where(beyond, 1 / (1 + (size / jnp.where(q > 0, q, 1)) ** 2), 1)
        return c * self.clip_low, c * self.clip_high

    def formula(self) -> str:
        bounded = f"min(r A, clip(r, 1 - {self.clip_low:g} c, 1 + {self.clip_high:g} c) A)"
        dual = bounded if self.dual_clip is None else f"max({bounded}, {self.dual_clip:g} A if A < 0)"
        return f"{dual}; c = 1 / (1 + (abs(log r) / q)^2) beyond q; q = quantile(abs(log r), {self.tail:g})"


@dataclasses.dataclass(frozen=True)
class DivergenceMask(Surrogate):
    """M r A: a token is masked, instead of its ratio being clipped, where the two policies have moved too far apart.

    M_t = 0 where A > 0, p > q and D(q, p) > divergence_high, and where A < 0, p < q and D(q, p) > divergence_low;
    else 1. p = pi_theta(y_t) and q = p / r are the probabilities of the sampled token alone, so D is a
    divergence of Bernoulli distributions:

        tv   |p - q|                                              kl   q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    A rare token may multiply its probability many times over; one of probability 0.9 may not even fall to 0.7.

    Source: DPPO, arXiv 2602.04879 (binary approximations), read in the code of verl and TRL, not in the paper's text;
    both also bound r (by 20 and 10) and differentiate sg(r) log pi: the same gradient. Default thresholds: verl's.
    """

    divergence: str = hyperparameter("tv", "tv | kl: DPPO's divergence of the two probabilities of a sampled token")
    divergence_low: float = hyperparameter(0.2, "DPPO: tokens that fall with A < 0 are masked beyond it")
    divergence_high: float = hyperparameter(0.2, "DPPO: tokens that rise with A > 0 are masked beyond it")
    units: ClassVar[tuple[str, ...]] = ("token",)

    def __post_init__(self) -> None:
        one_of("divergence", self.divergence, ("tv", "kl"))
        positive("divergence_low", self.divergence_low)
        positive("divergence_high", self.divergence_high)

    def between(self, log_p: PerToken, log_q: PerToken) -> PerToken:
        """D(q, p) of every token, [b t]."""
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        if self.divergence == "tv":
            return jnp.abs(p - q)
        rest_p, rest_q = (jnp.log1p(-jnp.minimum(x, 1 - 1e-7)) for x in (p, q))  # finite for a certain token
        return q * (log_q - log_p) + (1 - q) * (rest_q - rest_p)

    def clipped(self, log_ratio: PerToken, batch: Batch) -> tuple[Mask, Mask]:
        log_p = jnp.where(batch.mask, batch.logprobs, 0)
        distance = self.between(log_p, log_p - log_ratio)
        falls, rises = (batch.advantages < 0) & (log_ratio < 0), (batch.advantages > 0) & (log_ratio > 0)
        return falls & (distance > self.divergence_low), rises & (distance > self.divergence_high)

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        low, high = self.clipped(log_ratio, batch)
        return batch.advantages * jnp.where(low | high, 0, jnp.exp(log_ratio))

    def formula(self) -> str:
        low, high = f"{self.divergence_low:g} downwards (A < 0)", f"{self.divergence_high:g} upwards (A > 0)"
        return f"M r A; M = 0 beyond {self.divergence} {low}, {high}, else 1"
