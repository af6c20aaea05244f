"""Why the ratio moves: the log-ratio split into the part of the parameters and the part of the experts.

With e_old the experts of pi_old and e the experts chosen by the current router, for every answer token

    log r      = log pi(. | e)     - log pi_old(. | e_old)       scored without replay, whatever training replays
    parameter  = log pi(. | e_old) - log pi_old(. | e_old)
    routing    = log pi(. | e)     - log pi(. | e_old)           selection only; gate weights belong to `parameter`

sum exactly. Parameters first is the definition; the other order differs by an interaction of the same size, so the mean
of both orders (Shapley) stands beside it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import metrics as M
from jaxrl_llm.array_typing import Array, Bool, Mask, PerToken
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.scoring import previous
from jaxrl_llm.training.agreement import differ, flips
from jaxrl_llm.training.layout import Layout
from jaxrl_llm.training.state import TrainBatch
from jaxrl_llm.training.step import Learner, Scored

__all__ = ["decompose", "diagnose", "flipped_before", "ratio_by_flip"]


def diagnose(
    learner: Learner, params: Any, old_params: Any, batch: TrainBatch, layout: Layout, frozen: Any = None
) -> dict[str, M.Metric]:
    """The decomposition on one minibatch, by three forwards.

    They are the current policy with its own experts e, the current policy with e_old, and the old policy with e.
    `frozen` is combined with both parameters, as for `Learner.update`.
    """
    scored = batch.routing.scored
    assert scored is not None, "a dense model has no routing to diagnose"
    rows, time = batch.tokens.shape

    def score(params: Any, replayed: Routing | None) -> Scored:
        into = learner.blank_scores(batch.tokens, record="experts")
        return learner.score(params, batch.tokens, replayed, layout, into=into, frozen=frozen)

    current = score(params, None)
    held = score(params, Routing(scored.experts))
    swapped = score(old_params, current.recorded)
    place = jnp.where(layout.index >= 0, layout.index, rows * time).ravel()  # -1 would count from the end
    inside = jnp.zeros(rows * time, bool).at[place].set(True, mode="drop")
    mask = batch.loss_mask & inside.reshape(rows, time)
    return _describe(batch, current, held.logprobs, swapped.logprobs, mask)


@jax.jit
def _describe(batch: TrainBatch, current: Scored, held: PerToken, swapped: PerToken, mask: Mask) -> dict[str, M.Metric]:
    old = batch.routing.scored
    assert old is not None
    assert batch.old_logprobs is not None
    assert current.recorded is not None
    assert current.logprobs is not None
    in_minibatch = mask.any(axis=1)
    routing = Routing(jnp.where(in_minibatch[None, :, None, None], current.recorded.experts, old.experts))
    segment_ids = jnp.where(in_minibatch[:, None], batch.segment_ids, 0)
    return (
        decompose(current.logprobs, held, swapped, batch.old_logprobs, mask)
        | flips("routing/flips_fresh", old, routing, segment_ids)
        | ratio_by_flip(current.logprobs - batch.old_logprobs, flipped_before(old, routing), mask)
    )


def decompose(current: PerToken, held: PerToken, swapped: PerToken, old: PerToken, mask: Mask) -> dict[str, M.Metric]:
    """Shares of Var(log r) over unmasked tokens.

    routing/share_of_variance = Cov(routing, log r) / Var(log r); the parameters' share is one minus it.

    Args:
      current: log pi(. | e).   held: log pi(. | e_old).   swapped: log pi_old(. | e).   old: log pi_old(. | e_old).
    """
    ratio, routing = current - old, current - held
    shapley = (routing + swapped - old) / 2
    n = jnp.maximum(jnp.sum(mask), 1)

    def centred(x: PerToken) -> PerToken:
        return jnp.where(mask, x - jnp.sum(x, where=mask) / n, 0)

    variance = jnp.sum(centred(ratio) ** 2)

    def share(part: PerToken) -> M.Mean:
        return M.Mean(jnp.sum(centred(part) * centred(ratio)), variance)

    def spread(part: PerToken) -> M.Mean:
        return M.Mean(jnp.sum(centred(part) ** 2), n.astype(jnp.float32))

    return {
        "routing/share_of_variance": share(routing),
        "routing/share_of_variance_shapley": share(shapley),
        "routing/log_ratio_var": spread(ratio),
        "routing/parameter_var": spread(held - old),
        "routing/routing_var": spread(routing),
    }


def flipped_before(old: Routing, current: Routing) -> Bool[Array, "b t"]:
    """Whether any expert of any layer differs at a position before t: those reach token t through attention."""
    share, both = differ(old, current)
    here = jnp.any((share > 0) & both, axis=0)
    return previous(jax.lax.cummax(here.astype(jnp.int32), axis=1) > 0)


def ratio_by_flip(log_ratio: PerToken, flipped: Mask, mask: Mask) -> dict[str, M.Metric]:
    """Mean, variance, 99th percentile and maximum of the token ratio, apart for flipped tokens and for the others."""
    log_ratio = jnp.clip(log_ratio, -20, 20)
    metrics: dict[str, M.Metric] = {"routing/flipped_tokens": M.Mean.of(flipped * 1.0, mask)}
    for name, where in (("flipped", mask & flipped), ("unflipped", mask & ~flipped)):
        metrics |= {
            f"routing/ratio_{name}": M.Moments.of(jnp.expm1(log_ratio), where),
            f"routing/ratio_{name}_p99": M.Histogram.of(log_ratio, where),
            f"routing/ratio_{name}_max": M.Maximum.of(jnp.exp(log_ratio), where),
        }
    return metrics
