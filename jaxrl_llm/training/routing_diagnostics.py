"""Why the ratio moves: the log-ratio split into what the parameters did and what the choice of experts did.

With e_old the experts of pi_old and e the experts that the current router chooses, for every answer token

    log r      = log pi(. | e)     - log pi_old(. | e_old)       scored fresh, whatever training replays
    parameter  = log pi(. | e_old) - log pi_old(. | e_old)
    routing    = log pi(. | e)     - log pi(. | e_old)           selection only; gate weights belong to `parameter`

sum exactly. Parameters first is the definition; the other order differs by an interaction of the same size, so the mean
of both orders (Shapley) stands beside it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import metrics as M
from jaxrl_llm.array_typing import Array, Bool, Float, Mask, PerToken
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.training.layout import Layout
from jaxrl_llm.training.routing_replay import differ, flips
from jaxrl_llm.training.state import TrainBatch
from jaxrl_llm.training.step import Learner, Scored

__all__ = ["decompose", "diagnose", "expert_load", "flipped_before", "ratio_by_flip"]


def diagnose(learner: Learner, params: Any, old_params: Any, batch: TrainBatch, layout: Layout) -> dict[str, M.Metric]:
    """The decomposition on one minibatch: three forwards (current fresh, current with e_old, old with e)."""
    assert batch.recorded is not None, "a dense model has no routing to diagnose"
    rows, time = batch.tokens.shape

    def score(params: Any, routing: Routing | None) -> Scored:
        return learner.score(params, batch.tokens, routing, layout, into=learner.room(batch.tokens, routing="experts"))

    fresh = score(params, None)
    held = score(params, Routing(batch.recorded.experts))
    swapped = score(old_params, fresh.routing)
    place = jnp.where(layout.index >= 0, layout.index, rows * time).ravel()  # -1 would count from the end
    inside = jnp.zeros(rows * time, bool).at[place].set(True, mode="drop")
    mask = batch.loss_mask & inside.reshape(rows, time)
    return _describe(batch, fresh, held.logprobs, swapped.logprobs, mask)


@jax.jit
def _describe(batch: TrainBatch, fresh: Scored, held: PerToken, swapped: PerToken, mask: Mask) -> dict[str, M.Metric]:
    assert batch.recorded is not None
    assert batch.old_logprobs is not None
    assert fresh.routing is not None
    assert fresh.logprobs is not None
    experts = jnp.where(mask.any(axis=1)[None, :, None, None], fresh.routing.experts, batch.recorded.experts)
    found = decompose(fresh.logprobs, held, swapped, batch.old_logprobs, mask)
    flipped = flipped_before(batch.recorded, Routing(experts))
    valid = jnp.where(mask.any(axis=1)[:, None], batch.segment_ids, 0)
    return (
        found
        | flips("routing/flips_fresh", batch.recorded, Routing(experts), valid)
        | ratio_by_flip(fresh.logprobs - batch.old_logprobs, flipped, mask)
    )


def decompose(fresh: PerToken, held: PerToken, swapped: PerToken, old: PerToken, mask: Mask) -> dict[str, M.Metric]:
    """Shares of Var(log r) over unmasked tokens.

    Args:
      fresh: log pi(. | e).   held: log pi(. | e_old).   swapped: log pi_old(. | e).   old: log pi_old(. | e_old).

    routing/share_of_variance = Cov(routing, log r) / Var(log r); the parameters' share is one minus it.
    """
    ratio, routing = fresh - old, fresh - held
    shapley = (routing + swapped - old) / 2
    n = jnp.maximum(jnp.sum(mask), 1)
    centred = lambda x: jnp.where(mask, x - jnp.sum(x, where=mask) / n, 0)  # noqa: E731
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
    up_to = jax.lax.cummax(here.astype(jnp.int32), axis=1) > 0
    return jnp.concatenate([jnp.zeros_like(up_to[:, :1]), up_to[:, :-1]], axis=1)


def ratio_by_flip(log_ratio: PerToken, flipped: Mask, mask: Mask) -> dict[str, M.Metric]:
    """Mean, variance, 99th percentile and maximum of the token ratio, apart for flipped tokens and for the others."""
    log_ratio = jnp.clip(log_ratio, -20, 20)
    found: dict[str, M.Metric] = {"routing/flipped_tokens": M.Mean.of(flipped * 1.0, mask)}
    for name, where in (("flipped", mask & flipped), ("unflipped", mask & ~flipped)):
        found |= {
            f"routing/ratio_{name}": M.Moments.of(jnp.expm1(log_ratio), where),
            f"routing/ratio_{name}_p99": M.Histogram.of(log_ratio, where),
            f"routing/ratio_{name}_max": M.Maximum.of(jnp.exp(log_ratio), where),
        }
    return found


def expert_load(routing: Routing, num_experts: int) -> dict[str, M.Metric]:
    """How evenly tokens spread: E max_e f_e and the share of experts in use, by layer (1 and 1 when even)."""
    layers = routing.experts.reshape(routing.experts.shape[0], -1).astype(jnp.int32)  # "no record" falls outside

    def of_layer(chosen: Array) -> tuple[Float[Array, ""], Float[Array, ""]]:
        count = jnp.zeros(num_experts, jnp.float32).at[chosen].add(1.0, mode="drop")
        return num_experts * jnp.max(count) / jnp.maximum(jnp.sum(count), 1), jnp.mean(count > 0)

    largest, used = jax.vmap(of_layer)(layers)
    one = jnp.ones_like(largest)
    return {"routing/load_max_by_layer": M.Mean(largest, one), "routing/experts_used_by_layer": M.Mean(used, one)}
