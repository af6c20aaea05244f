"""Metrics of one batch, the same for every objective. Formulas and healthy ranges: docs/metrics.md."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float, PerToken
from jaxrl_llm.ground.metrics import EffectiveSize, ExplainedVariance, Histogram, Maximum, Mean, Metric, Moments
from jaxrl_llm.objectives.batch import Batch, sequence_mean, token_log_ratio
from jaxrl_llm.objectives.corrections import Correction
from jaxrl_llm.objectives.divergences import k3
from jaxrl_llm.objectives.ratios import Ratio
from jaxrl_llm.objectives.surrogates import Surrogate

RARE = 0.2  # a token is rare where the policy that sampled it gave it less probability


def gradient_weights(policy: Callable[[Batch], PerToken], batch: Batch) -> PerToken:
    """g_t = (d/d logprobs_t of sum_u policy_u) / A_t, [b t]; 0 where A_t = 0.

    REINFORCE has g = 1, a clip r_t or 0, SAPO w(r_t) r_t, GSPO s_i or 0 on every token of the answer. The aggregation
    does not enter, because the un-reduced policy term is differentiated.
    """

    def total(logprobs: PerToken) -> Float[Array, ""]:
        return jnp.sum(policy(dataclasses.replace(batch, logprobs=logprobs)), where=batch.mask)

    gradient = jax.grad(total)(batch.logprobs)
    signed = batch.advantages != 0
    return jnp.where(signed, gradient / jnp.where(signed, batch.advantages, 1), 0)


def diagnose(
    policy: Callable[[Batch], PerToken],
    ratio: Ratio,
    surrogate: Surrogate,
    correction: Correction | None,
    batch: Batch,
    terms: Mapping[str, tuple[Array, Array]],
) -> dict[str, Metric]:
    """All metrics of a batch; none of them carries a gradient."""
    batch = batch.detached()
    weights = gradient_weights(policy, batch)
    metrics: dict[str, Metric] = {
        f"loss/{name}": Mean(jax.lax.stop_gradient(total).astype(jnp.float32), count)
        for name, (total, count) in terms.items()
        if name != "entropy"
    }
    log_s, answers = sequence_mean(batch.log_ratio, *batch.sequences), batch.lengths > 0
    metrics |= {
        "ratio/token": Moments.of(jnp.expm1(batch.log_ratio), batch.mask),
        "ratio/ess": EffectiveSize.of(jnp.expm1(batch.log_ratio), batch.mask),
        "ratio/token_p99": Histogram.of(batch.log_ratio, batch.mask),
        "ratio/token_max": Maximum.of(jnp.exp(batch.log_ratio), batch.mask),
        "ratio/sequence": Moments.of(jnp.expm1(log_s), answers),
        "ratio/sequence_max": Maximum.of(jnp.exp(log_s), answers),
        "kl/old": Mean.of(k3(batch.log_ratio), batch.mask),
    }
    metrics |= surrogate.metrics(ratio(batch), batch)
    good, rare = batch.mask & (batch.advantages > 0), batch.old_logprobs < jnp.log(RARE)
    metrics["gradient_weight/positive"] = Mean.of(weights, good)
    metrics["gradient_weight/positive_rare"] = Mean.of(weights, good & rare)
    metrics["gradient_weight/negative"] = Mean.of(weights, batch.mask & (batch.advantages < 0))
    if batch.sampler_logprobs is not None:
        log_k = token_log_ratio(batch.old_logprobs, batch.sampler_logprobs, batch.mask)
        metrics |= {
            "kl/sampler": Mean.of(k3(log_k), batch.mask),
            "mismatch/mean": Mean.of(jnp.abs(log_k), batch.mask),
            "mismatch/max": Maximum.of(jnp.abs(log_k), batch.mask),
            "mismatch/above_2": Mean.of(jnp.abs(log_k) > jnp.log(2.0), batch.mask),
        }
    if correction is not None:
        metrics["mismatch/weight"] = Mean.of(correction(batch), batch.mask)
    if batch.ref_logprobs is not None:
        metrics["kl/ref"] = Mean.of(k3(token_log_ratio(batch.ref_logprobs, batch.logprobs, batch.mask)), batch.mask)
    if batch.teacher_logprobs is not None:
        log_q = token_log_ratio(batch.teacher_logprobs, batch.logprobs, batch.mask)
        metrics["kl/teacher"] = Mean.of(k3(log_q), batch.mask)
    if batch.returns is not None and batch.old_values is not None:
        metrics["value/explained_variance"] = ExplainedVariance.of(batch.returns, batch.old_values, batch.mask)
    if batch.entropy is not None:
        metrics["entropy"] = Mean.of(batch.entropy, batch.mask)
    return metrics
