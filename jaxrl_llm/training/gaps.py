"""How far two passes over the same tokens agree, in log-probs and in experts, and how evenly experts are used."""

import jax
import jax.numpy as jnp

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.array_typing import Array, Bool, Float, Mask, PerToken, SegmentIds
from jaxrl_llm.models import Routing, is_recorded
from jaxrl_llm.training.routing_records import by_router
from jaxrl_llm.training.state import TrainBatch

__all__ = ["differ", "expert_load", "flips", "logprob_gap", "old_against_current", "sampler_against_old"]


def sampler_against_old(batch: TrainBatch, logprobs: PerToken, routing: Routing | None) -> dict[str, M.Metric]:
    """The rollout engine against the pass of pi_old over `batch`, which gave these log-probs and this routing."""
    assert batch.sampler_logprobs is not None
    metrics = logprob_gap("check/old_sampler", logprobs - batch.sampler_logprobs, batch.loss_mask)
    if batch.routing.sampled is not None and routing is not None:
        metrics |= flips("routing/flips_sampler_old", batch.routing.sampled, routing, batch.segment_ids)
    return metrics


def old_against_current(batch: TrainBatch, logprobs: PerToken, routing: Routing | None) -> dict[str, M.Metric]:
    """pi_old against the training forward over `batch`, which gave these log-probs and this routing."""
    assert batch.old_logprobs is not None
    metrics = logprob_gap("check/current_old", logprobs - batch.old_logprobs, batch.loss_mask)
    if batch.routing.scored is not None and routing is not None:
        metrics |= flips("routing/flips_old_current", batch.routing.scored, routing, batch.segment_ids)
    return metrics


def logprob_gap(name: str, difference: PerToken, mask: Mask) -> dict[str, M.Metric]:
    """Mean |delta log p| and the share of tokens above 1e-2: what the run-time checks read."""
    size = jnp.abs(difference)
    return {f"{name}_mean": M.Mean.of(size, mask), f"{name}_share": M.Mean.of((size > 1e-2) * 1.0, mask)}


def differ(a: Routing, b: Routing) -> tuple[Float[Array, "l b t"], Bool[Array, "l b t"]]:
    """Share of a token's experts that are in a and not in b (a SET difference), and where both have a record."""
    same = a.experts.astype(jnp.int32)[..., :, None] == b.experts.astype(jnp.int32)[..., None, :]
    return 1 - jnp.mean(jnp.any(same, axis=-1), axis=-1), is_recorded(a.experts) & is_recorded(b.experts)


def flips(name: str, old: Routing, current: Routing, segment_ids: SegmentIds) -> dict[str, M.Metric]:
    """Share of activated experts that differ, in all and by layer.

    Where `current` has the router's logits, the experts chosen by the router are compared, not the replayed ones.
    """
    share, both = differ(old, by_router(current))
    both = both & (segment_ids != 0)[None]
    by_layer = M.Mean(
        jnp.sum(share, axis=(1, 2), where=both, dtype=jnp.float32), jnp.sum(both, axis=(1, 2), dtype=jnp.float32)
    )
    return {name: M.Mean(jnp.sum(by_layer.total), jnp.sum(by_layer.count)), f"{name}_by_layer": by_layer}


def expert_load(routing: Routing, num_experts: int) -> dict[str, M.Metric]:
    """How evenly tokens spread: E max_e f_e and the share of experts in use, by layer (1 and 1 when even)."""
    layers = routing.experts.reshape(routing.experts.shape[0], -1).astype(jnp.int32)  # "no record" falls outside

    def of_layer(experts: Array) -> tuple[Float[Array, ""], Float[Array, ""]]:
        count = jnp.zeros(num_experts, jnp.float32).at[experts].add(1.0, mode="drop")
        return num_experts * jnp.max(count) / jnp.maximum(jnp.sum(count), 1), jnp.mean(count > 0)

    largest, in_use = jax.vmap(of_layer)(layers)
    one = jnp.ones_like(largest)
    return {"routing/load_max_by_layer": M.Mean(largest, one), "routing/experts_used_by_layer": M.Mean(in_use, one)}
