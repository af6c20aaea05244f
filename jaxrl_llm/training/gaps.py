"""How far two passes over the same tokens agree, in log-probs and in experts; and why the ratio moves.

With e_old the experts of pi_old and e the experts chosen by the current router, for every answer token

    log r      = log pi(. | e)     - log pi_old(. | e_old)       scored without replay, whatever training replays
    parameter  = log pi(. | e_old) - log pi_old(. | e_old)
    routing    = log pi(. | e)     - log pi(. | e_old)           selection only; gate weights belong to `parameter`

sum exactly. Parameters first is the definition; the other order differs by an interaction of the same size, so the mean
of both orders (Shapley) is reported too.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, Mask, PerToken, SegmentIds
from jaxrl_llm.models import Routing, is_recorded
from jaxrl_llm.models.scoring import previous
from jaxrl_llm.objectives.batch import token_log_ratio
from jaxrl_llm.objectives.divergences import k3
from jaxrl_llm.rollout.rollout import Rollout


@jax.jit
def ages(
    versions: Integer[Array, "b t"], trained: Integer[Array, ""], mask: Mask
) -> tuple[PerToken, dict[str, M.Metric]]:
    """Steps between the policy that sampled a token and the one of `trained` steps, 0 where masked; and their metrics.

    versions: how many steps the sampling policy had been trained for.
    """
    age = jnp.where(mask, trained - versions, 0).astype(jnp.float32)
    return age, {"rollout/age_mean": M.Mean.of(age, mask), "rollout/age_max": M.Maximum.of(age, mask)}


def sampler_against_old(rollout: Rollout, logprobs: PerToken, routing: Routing | None) -> dict[str, M.Metric]:
    """The rollout engine against the pass of pi_old over `rollout`, which gave these log-probs and this routing.

    Log-probs are compared where both are of one policy, so that age is no part of the difference; experts everywhere.
    """
    assert rollout.sampler_logprobs is not None
    mask = rollout.loss_mask if rollout.age is None else rollout.loss_mask & (rollout.age == 0)
    found = _gap("check/old_sampler", logprobs - rollout.sampler_logprobs, mask)
    found["check/sampler_equal"] = M.Mean.of((logprobs == rollout.sampler_logprobs) * 1.0, mask)
    return found | _flips("routing/flips_sampler_old", rollout.routes.sampled, routing, rollout)


def old_against_current(rollout: Rollout, logprobs: PerToken, routing: Routing | None) -> dict[str, M.Metric]:
    """pi_old against the training forward over `rollout`, which gave these log-probs and this routing."""
    assert rollout.old_logprobs is not None
    found = _gap("check/current_old", logprobs - rollout.old_logprobs, rollout.loss_mask)
    return found | _flips("routing/flips_old_current", rollout.routes.scored, routing, rollout)


def _gap(name: str, difference: PerToken, mask: Mask) -> dict[str, M.Metric]:
    """Return what the run-time checks read: `gap` of |delta log p|."""
    return {f"{name}_{what}": value for what, value in gap(jnp.abs(difference), mask).items()}


def gap(size: PerToken, mask: Mask) -> dict[str, M.Metric]:
    """The mean, the share of tokens above 1e-2, and the mean of the rest of them."""
    above = size > 1e-2
    return {
        "mean": M.Mean.of(size, mask),
        "share": M.Mean.of(above * 1.0, mask),
        "rest": M.Mean.of(size, mask & ~above),
    }


def _flips(name: str, old: Routing | None, current: Routing | None, rollout: Rollout) -> dict[str, M.Metric]:
    """`flips`, if both passes have a record."""
    return {} if old is None or current is None else flips(name, old, current, rollout.segment_ids)


def differ(a: Routing, b: Routing) -> tuple[Float[Array, "l b t"], Bool[Array, "l b t"]]:
    """Share of a token's experts used in `a` that the router of `b` does not choose (a SET difference), and where both
    have a record."""
    same = a.experts.astype(jnp.int32)[..., :, None] == b.choice.astype(jnp.int32)[..., None, :]
    return jnp.mean(~jnp.any(same, axis=-1), axis=-1), is_recorded(a.experts) & is_recorded(b.experts)


def flips(name: str, old: Routing, current: Routing, segment_ids: SegmentIds) -> dict[str, M.Metric]:
    """Share of the experts used in `old` that the router of `current` does not choose, in all and by layer."""
    share, both = differ(old, current)
    both = both & (segment_ids != 0)[None]
    total = jnp.sum(share, axis=(1, 2), where=both, dtype=jnp.float32)
    by_layer = M.Mean(total, jnp.sum(both, axis=(1, 2), dtype=jnp.float32))
    return {name: M.Mean(jnp.sum(by_layer.total), jnp.sum(by_layer.count)), f"{name}_by_layer": by_layer}


def decompose(current: PerToken, held: PerToken, swapped: PerToken, old: PerToken, mask: Mask) -> dict[str, M.Metric]:
    """Shares of Var(log r) over unmasked tokens, tails, and the drift of the whole rollout.

    routing/share_of_variance = Cov(routing, log r) / Var(log r); the parameters' share is one minus it. A share hides
    the tails: the percentiles of |routing|, and the tokens at which |routing| and |log r| exceed 0.2 (the usual clip)
    and ln 2 (a doubled ratio). routing/kl_fresh is the k3 of log r.

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

    size, whole = jnp.abs(routing), jnp.abs(ratio)
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
        "routing/log_ratio_above_0.2": M.Mean.of((whole > 0.2) * 1.0, mask),
        "routing/log_ratio_above_ln2": M.Mean.of((whole > np.log(2)) * 1.0, mask),
        "routing/kl_fresh": M.Mean.of(k3(token_log_ratio(current, old, mask)), mask),
        "routing/share_of_variance": share(routing),
        "routing/share_of_variance_shapley": share(shapley),
        "routing/log_ratio_var": spread(ratio),
        "routing/parameter_var": spread(held - old),
        "routing/routing_var": spread(routing),
    }


def flipped_before(old: Routing, current: Routing) -> Bool[Array, "b t"]:
    """Return whether any expert of any layer differs before position t: those reach token t through attention."""
    share, both = differ(old, current)
    here = jnp.any((share > 0) & both, axis=0)
    return previous(jax.lax.cummax(here.astype(jnp.int32), axis=1) > 0)


def ratio_by_flip(log_ratio: PerToken, flipped: Mask, mask: Mask) -> dict[str, M.Metric]:
    """Moments, 99th percentile and maximum of the token ratio, for flipped tokens and for the others."""
    log_ratio = jnp.clip(log_ratio, -20, 20)
    metrics: dict[str, M.Metric] = {"routing/flipped_tokens": M.Mean.of(flipped * 1.0, mask)}
    for name, where in (("flipped", mask & flipped), ("unflipped", mask & ~flipped)):
        metrics |= {
            f"routing/ratio_{name}": M.Moments.of(jnp.expm1(log_ratio), where),
            f"routing/ratio_{name}_p99": M.Histogram.of(log_ratio, where),
            f"routing/ratio_{name}_max": M.Maximum.of(jnp.exp(log_ratio), where),
        }
    return metrics
