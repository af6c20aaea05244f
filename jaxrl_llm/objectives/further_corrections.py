"""Corrections that are imported when `objective.correction` names one: functions, then the choices.

log_k is log(pi_old / mu) of every token, 0 where masked; `batch` explains mask, sequence_ids and num_sequences.
"""

import dataclasses
import functools
import math
from typing import ClassVar

import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Mask, PerToken
from jaxrl_llm.objectives.batch import Batch, Ids, mean_of_answer, sequence_sum, to_tokens
from jaxrl_llm.objectives.corrections import Correction, decoupled, truncated_importance
from jaxrl_llm.objectives.divergences import k3
from jaxrl_llm.objectives.parts import hyperparameter
from jaxrl_llm.objectives.ratios import sequence_product


def without_any(beyond: Mask, mask: Mask, sequence_ids: Ids = None, num_sequences: int | None = None) -> PerToken:
    """1 on the tokens of answers that have no token of `beyond`, 0 on those of the others."""
    found = sequence_sum(jnp.where(beyond, 1.0, 0.0), mask, sequence_ids, num_sequences)
    return jnp.where(to_tokens(found, mask, sequence_ids) == 0, 1.0, 0.0)


def divergence_by_token(log_k: PerToken, estimator: str) -> PerToken:
    """Estimate KL(mu, pi_old) at a token: k1 = -log k, k2 = (log k)^2 / 2, k3 = k - 1 - log k."""
    return {"k1": lambda: -log_k, "k2": lambda: log_k**2 / 2, "k3": lambda: k3(log_k)}[estimator]()


def reject(
    log_k: PerToken,
    level: str,
    estimator: str,
    cap: float,
    mask: Mask,
    sequence_ids: Ids = None,
    num_sequences: int | None = None,
) -> PerToken:
    """1 where a divergence of sampler and trainer stays within its bound, else 0.

    The divergence is that of the token, or the sum, mean or maximum over its answer; level says which. The bound is
    `cap`; of k1 it is [-log cap, log cap], so that cap bounds a ratio there.

    Source: rejection by `rollout_rs` of verl 0.9.1; level "max": trust region masking, arXiv 2512.23075.
    """
    where = (mask, sequence_ids, num_sequences)
    size, bound = jnp.abs(divergence_by_token(log_k, estimator)), cap
    if estimator == "k1":
        bound = math.log(cap)
        size = size if level in ("token", "max") else -log_k
    if level == "max":
        return without_any(size > bound, *where)
    if level == "sum":
        size = to_tokens(sequence_sum(size, *where), mask, sequence_ids)
    elif level == "mean":
        size = mean_of_answer(size, *where)
    return jnp.where(jnp.abs(size) <= bound, 1.0, 0.0)


def second_moment_mask(log_k: PerToken, cap: float, mask: Mask) -> PerToken:
    """1 on the most tokens, by the size of log_k, whose mean of (log_k)^2 is below `cap`, at least one; 0 on the rest.

    Tokens of equal size stay together.  Source: M2PO, arXiv 2510.01161, read in AReaL's code.
    """
    squares = jnp.where(mask, log_k**2, jnp.inf).ravel()
    ordered = jnp.sort(squares)
    means = jnp.cumsum(jnp.where(jnp.isfinite(ordered), ordered, 0)) / jnp.arange(1, ordered.size + 1)
    kept = jnp.sum((means < cap) & jnp.isfinite(ordered))
    return jnp.where(squares <= ordered[jnp.maximum(kept, 1) - 1], 1.0, 0.0).reshape(log_k.shape)


def high_entropy_mask(entropy: PerToken, share: float, mask: Mask) -> PerToken:
    """1 on the tokens whose entropy is at least the (1 - share) quantile over unmasked tokens, else 0.

    Source: arXiv 2506.01939 (share 0.2), as `top_entropy_quantile` of TRL.
    """
    limit = jnp.nanquantile(jnp.where(mask, entropy, jnp.nan), 1 - share)
    return jnp.where(entropy >= limit, 1.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Clamped(Correction):
    """k between `floor` and `cap`.  Source: `tis` of OpenRLHF with its thresholds; slime and NeMo-RL have both too."""

    cap: float = hyperparameter(5.0, above=1)
    floor: float = hyperparameter(0.5, above=0, most=1)
    equation: ClassVar[str] = "w = min(max(k, {floor:g}), {cap:g}); k = pi_old / mu, mu the sampler"

    def weight(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return jnp.clip(jnp.exp(log_ratio), self.floor, self.cap)


@dataclasses.dataclass(frozen=True)
class SequenceTruncated(Correction):
    """min(W, cap), W = prod_t k of the answer within e^-20 and e^20, on each of its tokens.

    Source: sequence-level importance sampling of TRL (`sequence_truncate`) and verl (`rollout_is=sequence`).
    """

    cap: float = hyperparameter(2.0, above=0)
    equation: ClassVar[str] = "w = min(prod_t k, {cap:g}); k = pi_old / mu, mu the sampler"

    def weight(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return truncated_importance(sequence_product(log_ratio, *batch.sequences, bound=20.0), self.cap)


@dataclasses.dataclass(frozen=True)
class SequenceDecoupled(Correction):
    """W = prod_t k of the answer, 0 where it is above the cap.  Source: `sequence_mask` of TRL, whose cap is 3."""

    cap: float | None = hyperparameter(3.0, above=0)
    equation: ClassVar[str] = "w = prod_t k up to {cap:g}, else 0; k = pi_old / mu, mu the sampler"

    def weight(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return decoupled(sequence_product(log_ratio, *batch.sequences, bound=20.0), self.cap)


@dataclasses.dataclass(frozen=True)
class Reject(Correction):
    """`reject`, one class for all levels and estimators; k1's cap is a ratio, the others' a divergence in nats."""

    cap: float = hyperparameter(2.0, above=0)
    level: str = "token"
    estimator: str = "k1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimator == "k1" and self.cap <= 1:
            raise ValueError(f"correction_cap={self.cap} of k1 bounds the ratio by [1 / cap, cap]; give it above 1")

    def weight(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return reject(log_ratio, self.level, self.estimator, self.cap, *batch.sequences)

    def formula(self) -> str:
        size = {"k1": "abs(log k)", "k2": "(log k)^2 / 2", "k3": "(k - 1 - log k)"}[self.estimator]
        size = size if self.level == "token" else f"{self.level}_t {size}"
        bound = math.log(self.cap) if self.estimator == "k1" else self.cap
        return f"w = 1 if {size} <= {bound:.4g}, else 0; k = pi_old / mu, mu the sampler"


# one token that one of the two policies finds all but impossible: `outlier_token` mask of SkyRL, token veto of verl 0.6
veto = functools.partial(Reject, cap=1e4, level="max", estimator="k1")
token_k1 = functools.partial(Reject, cap=2.0, level="token", estimator="k1")
token_k2 = functools.partial(Reject, cap=0.1, level="token", estimator="k2")
token_k3 = functools.partial(Reject, cap=0.1, level="token", estimator="k3")
seq_sum_k1 = functools.partial(Reject, cap=2.0, level="sum", estimator="k1")
seq_sum_k2 = functools.partial(Reject, cap=0.1, level="sum", estimator="k2")
seq_sum_k3 = functools.partial(Reject, cap=0.1, level="sum", estimator="k3")
seq_mean_k2 = functools.partial(Reject, cap=0.01, level="mean", estimator="k2")
seq_mean_k3 = functools.partial(Reject, cap=0.01, level="mean", estimator="k3")
seq_max_k2 = functools.partial(Reject, cap=0.1, level="max", estimator="k2")
seq_max_k3 = functools.partial(Reject, cap=0.1, level="max", estimator="k3")


@dataclasses.dataclass(frozen=True)
class SecondMoment(Correction):
    """`second_moment_mask`; the default is that of AReaL."""

    cap: float = hyperparameter(0.04, above=0)
    whole_minibatch: ClassVar[bool] = True  # its tokens are sorted together
    equation: ClassVar[str] = "w = 1 on the most tokens with mean (log k)^2 < {cap:g}, else 0; k = pi_old / mu"

    def weight(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return second_moment_mask(log_ratio, self.cap, batch.mask)


@dataclasses.dataclass(frozen=True)
class HighEntropy(Correction):
    """`high_entropy_mask`, by the entropy of the trained policy; the cap is the share of tokens that is kept."""

    cap: float = hyperparameter(0.2, above=0, most=1)
    needs: ClassVar[frozenset[str]] = Correction.needs | {"entropy"}
    whole_minibatch: ClassVar[bool] = True  # the quantile is one number for all its tokens
    equation: ClassVar[str] = "w = 1 on the {cap:g} of tokens with the highest entropy, else 0"

    def weight(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return high_entropy_mask(batch.masked("entropy"), self.cap, batch.mask)
