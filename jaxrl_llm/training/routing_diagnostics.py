"""Why the ratio moves: the log-ratio split into a parameter part and a routing part.

With e_old the experts of pi_old and e the experts chosen by the current router, for every answer token

    log r      = log pi(. | e)     - log pi_old(. | e_old)       scored without replay, whatever training replays
    parameter  = log pi(. | e_old) - log pi_old(. | e_old)
    routing    = log pi(. | e)     - log pi(. | e_old)           selection only; gate weights belong to `parameter`

sum exactly. Parameters first is the definition; the other order differs by an interaction of the same size, so the mean
of both orders (Shapley) is reported too.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.array_typing import Array, Bool, Mask, PerToken
from jaxrl_llm.models import Routing
from jaxrl_llm.models.scoring import previous
from jaxrl_llm.training.gaps import differ, flips
from jaxrl_llm.training.layout import Layout
from jaxrl_llm.training.state import TrainBatch
from jaxrl_llm.training.step import Learner, Scored

__all__ = ["decompose", "diagnose", "flipped_before", "ratio_by_flip"]


def diagnose(
    learner: Learner,
    params: Any,
    old_params: Any,
    batch: TrainBatch,
    layouts: Sequence[Layout],
    frozen: Any = None,
) -> dict[str, M.Metric]:
    """The decomposition over a whole rollout, by three forwards.

    They are the current policy with its own experts e, the current policy with e_old, and the old policy with e.

    Args:
      layouts: the minibatches of one epoch, at whose shapes training scored and updated.
      frozen: combined with both parameters, as for `Learner.update`.
    """
    scored = batch.routing.scored
    assert scored is not None, "a dense model has no routing to diagnose"

    def score(params: Any, replayed: Routing | None) -> Scored:
        into = learner.blank_scores(batch.tokens, record="experts")
        for layout in layouts:
            into = learner.score(params, batch.tokens, replayed, layout, into=into, frozen=frozen)
        return into

    current = score(params, None)
    held = score(params, Routing(scored.experts))
    swapped = score(old_params, current.recorded)
    return _describe(batch, current, held.logprobs, swapped.logprobs)


@jax.jit
def _describe(batch: TrainBatch, current: Scored, held: PerToken, swapped: PerToken) -> dict[str, M.Metric]:
    old, mask = batch.routing.scored, batch.loss_mask
    assert old is not None
    assert batch.old_logprobs is not None
    assert current.recorded is not None
    assert current.logprobs is not None
    return (
        decompose(current.logprobs, held, swapped, batch.old_logprobs, mask)
        | flips("routing/flips_fresh", old, current.recorded, batch.segment_ids)
        | ratio_by_flip(current.logprobs - batch.old_logprobs, flipped_before(old, current.recorded), mask)
    )


def decompose(current: PerToken, held: PerToken, swapped: PerToken, old: PerToken, mask: Mask) -> dict[str, M.Metric]:
    """Shares of Var(log r) over unmasked tokens.

    routing/share_of_variance = Cov(routing, log r) / Var(log r); the parameters' share is one minus it. Beside it
    stand the tails of |routing|, which a share hides: the median, the 90th and the 99th percentile, and the share of
    tokens beyond 0.2 (the usual clip) and beyond ln 2 (a doubled ratio).

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

    size = jnp.abs(routing)
    ordered = jnp.sort(jnp.where(mask, size, jnp.inf), axis=None)

    def quantile(q: float) -> M.Mean:
        """The lower of the two order statistics next to the quantile; NaN of no token."""
        at = jnp.floor(q * (n - 1)).astype(jnp.int32)
        one = jnp.any(mask).astype(jnp.float32)
        return M.Mean(jnp.where(one > 0, ordered[at], 0), one)

    return {
        "routing/part_p50": quantile(0.5),
        "routing/part_p90": quantile(0.9),
        "routing/part_p99": quantile(0.99),
        "routing/part_above_0.2": M.Mean.of((size > 0.2) * 1.0, mask),
        "routing/part_above_ln2": M.Mean.of((size > np.log(2)) * 1.0, mask),
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
    """Mean, variance, 99th percentile and maximum of the token ratio, separately for flipped tokens and for the
    others."""
    log_ratio = jnp.clip(log_ratio, -20, 20)
    metrics: dict[str, M.Metric] = {"routing/flipped_tokens": M.Mean.of(flipped * 1.0, mask)}
    for name, where in (("flipped", mask & flipped), ("unflipped", mask & ~flipped)):
        metrics |= {
            f"routing/ratio_{name}": M.Moments.of(jnp.expm1(log_ratio), where),
            f"routing/ratio_{name}_p99": M.Histogram.of(log_ratio, where),
            f"routing/ratio_{name}_max": M.Maximum.of(jnp.exp(log_ratio), where),
        }
    return metrics
