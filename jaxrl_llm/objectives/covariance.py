"""Surrogates that hold back the tokens whose covariance of log-prob and advantage is large, which lower the entropy."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Mask, PerToken
from jaxrl_llm.ground.masking import masked_mean
from jaxrl_llm.objectives.batch import Batch
from jaxrl_llm.objectives.parts import hyperparameter
from jaxrl_llm.objectives.surrogates import Clip, Surrogate


def covariance(logprobs: PerToken, advantages: PerToken, mask: Mask) -> PerToken:
    """(log pi - mean)(A - mean) of every token, detached; the means are over unmasked tokens. -inf where masked.

    Source: The entropy mechanism of RL, arXiv 2505.22617, read in verl's code.
    """
    logprobs = jax.lax.stop_gradient(logprobs)
    product = (logprobs - masked_mean(logprobs, mask)) * (advantages - masked_mean(advantages, mask))
    return jnp.where(mask, product, -jnp.inf)


def largest(x: PerToken, share: float, mask: Mask) -> Mask:
    """The share of unmasked tokens with the largest x, at least one, rounded down; never one where x is -inf.

    Tokens that equal the last of them are taken too.
    """
    count = jnp.maximum(jnp.floor(share * jnp.sum(mask)), 1).astype(int)
    limit = jnp.sort(x.ravel())[x.size - count]
    return (x >= limit) & (x > -jnp.inf)


def scattered(logprobs: PerToken) -> PerToken:
    """Numbers in [0, 1) that look random, from the last digits of log-probs: a draw that a resume repeats."""
    return jnp.mod(jnp.abs(logprobs) * 4096, 1)


@dataclasses.dataclass(frozen=True)
class ClipCov(Clip):
    """`clip`, and 0 on a share of tokens drawn from those inside the clip range whose `covariance` is between bounds.

    The paper draws at random; this draw is that of the largest `scattered` old log-probs.

    Source: Clip-Cov, arXiv 2505.22617; share and bounds as in verl.
    """

    clip_cov_share: float = hyperparameter(2e-4, "Clip-Cov: share of tokens held back", above=0, most=1)
    cov_low: float = hyperparameter(1.0, "Clip-Cov: least covariance of a token held back")
    cov_high: float = hyperparameter(5.0, "Clip-Cov: largest covariance of a token held back")
    whole_minibatch: ClassVar[bool] = True  # means and draw are over all its tokens

    def held_back(self, log_ratio: PerToken, batch: Batch) -> Mask:
        size = covariance(batch.masked("logprobs"), batch.advantages, batch.mask)
        low, high = super().clipped(log_ratio, batch)
        drawn_from = (size > self.cov_low) & (size < self.cov_high) & ~low & ~high
        draw = jnp.where(drawn_from, scattered(batch.masked("old_logprobs")), -jnp.inf)
        return largest(draw, self.clip_cov_share, batch.mask)

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return jnp.where(self.held_back(log_ratio, batch), 0, super().__call__(log_ratio, batch))

    def formula(self) -> str:
        chosen = f"{self.clip_cov_share:g} of tokens with cov(log pi, A) in [{self.cov_low:g}, {self.cov_high:g}]"
        return f"M {super().formula()}; M = 0 on {chosen}, else 1"


@dataclasses.dataclass(frozen=True)
class KlCov(Surrogate):
    """r A - coef |log r| on the share of tokens with the largest `covariance`, r A on the others, without a clip.

    Source: KL-Cov, arXiv 2505.22617; the penalty |log r| is that of the authors' code and of verl.
    """

    kl_cov_share: float = hyperparameter(2e-4, "KL-Cov: share of tokens with a penalty", above=0, most=1)
    kl_cov_coef: float = hyperparameter(1.0, "KL-Cov: weight of the penalty abs(log r)", least=0)
    whole_minibatch: ClassVar[bool] = True  # means and share are over all its tokens
    units: ClassVar[tuple[str, ...]] = ("token",)
    equation: ClassVar[str] = (
        "r A - {kl_cov_coef:g} M abs(log r); M = 1 on the {kl_cov_share:g} of tokens with most cov(log pi, A), else 0"
    )

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        size = covariance(batch.masked("logprobs"), batch.advantages, batch.mask)
        distance = jnp.sign(log_ratio) * log_ratio  # |log r|, with gradient 0 at 0
        penalty = jnp.where(largest(size, self.kl_cov_share, batch.mask), distance, 0)
        return jnp.exp(log_ratio) * batch.advantages - self.kl_cov_coef * penalty
