"""The routing of one rollout: what was recorded when it was sampled and when it was scored, and what is replayed.

Three words, used in this sense everywhere: the experts *chosen by the router* are the top k of its own logits; those
*recorded* are the ones that a forward used and returned; those *replayed* are a record given to another forward, which
uses them in place of its router's choice.
"""

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float, SegmentIds
from jaxrl_llm.models import ModelConfig, Routing, is_recorded, no_record, routing_dtype
from jaxrl_llm.models.scoring import following

__all__ = ["RoutingRecords", "blank", "by_router", "count_unrecorded", "router_logprobs"]


class RoutingRecords(flax.struct.PyTreeNode):
    """All routing that belongs to a rollout, [l b t k]; None where there is none.

    sampled: recorded by the rollout engine.
    scored: recorded when the old policy scored the rollout, with its router's logits
      where something needs them.
    replayed: what the training forward replays; `routing_replay.prescribe` decides.
    """

    sampled: Routing | None = None
    scored: Routing | None = None
    replayed: Routing | None = None


def blank(config: ModelConfig, rows: int, time: int, logits: bool) -> Routing:
    """An empty record in the shape of a rollout."""
    dtype = routing_dtype(config.num_experts)
    shape = (config.num_moe_layers, rows, time)
    experts = jnp.full((*shape, config.num_experts_per_tok), jnp.iinfo(dtype).max, dtype)
    return Routing(experts, jnp.zeros((*shape, config.num_experts), jnp.float32) if logits else None)


def by_router(routing: Routing) -> Routing:
    """The experts chosen by the router, the top k of its logits; the recorded ones if there are no logits."""
    if routing.logits is None:
        return routing
    experts = jax.lax.top_k(routing.logits, routing.experts.shape[-1])[1]
    recorded = is_recorded(routing.experts)[..., None]
    return Routing(jnp.where(recorded, experts.astype(routing.experts.dtype), no_record(routing.experts)))


def count_unrecorded(routing: Routing, segment_ids: SegmentIds) -> Float[Array, ""]:
    """How many (layer, token) pairs that were fed have no record; the last token of a row was never fed."""
    fed = following(segment_ids != 0)
    return jnp.sum(fed[None] & ~is_recorded(routing.experts), dtype=jnp.float32)


def router_logprobs(logits: Float[Array, "l b t e"], recorded: Routing) -> Float[Array, "l b t k"]:
    """log of the full router softmax at the experts that were recorded (0 where there is no record)."""
    known = recorded.experts != no_record(recorded.experts)
    at_recorded = jnp.take_along_axis(
        jax.nn.log_softmax(logits, axis=-1), jnp.where(known, recorded.experts, 0).astype(jnp.int32), axis=-1
    )
    return jnp.where(known, at_recorded, 0)
