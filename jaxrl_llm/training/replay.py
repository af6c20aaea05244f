"""Routing replay: the records of a rollout's routing, and which of them a forward replays.

The experts *chosen by the router* are the top k of its own logits; those *recorded* are the ones that a forward used
and returned; those *replayed* are a record given to another forward, which uses them in place of its router's choice.

off  nothing is replayed.
R2   the routing of pi_old, recorded when the trainer scores the rollout, is replayed in training.
R3   the routing of the rollout engine is replayed in scoring and in training.

Replay acts in every MoE layer, on prompt and answer. The reference model, a separate critic and evaluation never
replay. Sources: R2 in GSPO, arXiv 2507.18071 section 5.3; R3 in arXiv 2510.11370.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float, SegmentIds
from jaxrl_llm.ground.declared import Block, declared
from jaxrl_llm.models import Routing, experts_of, is_recorded, no_record
from jaxrl_llm.models.scoring import following


@dataclasses.dataclass(frozen=True)
class ReplayConfig(Block, prefix="replay."):
    """Routing replay, MoE only."""

    mode: str = declared("off", among={"off": "", "R2": "of the scoring pass", "R3": "of the rollout"})
    what: str = declared(
        "experts", among={"experts": "indices; gates follow the current router", "logits": "indices and gates"}
    )


class RoutingRecords(flax.struct.PyTreeNode):
    """All routing that belongs to a rollout; None where there is none."""

    sampled: Routing | None = None  # recorded by the rollout engine
    scored: Routing | None = None  # recorded by the old policy's scoring pass, with logits where something needs them
    replayed: Routing | None = None  # by the training forward; `prescribe` decides


def in_scoring(config: ReplayConfig, sampled: Routing | None) -> Routing | None:
    """What the scoring pass of the old policy replays; raises as `prescribe`."""
    return _replayed(config, sampled, "rollout") if config.mode == "R3" else None


def prescribe(config: ReplayConfig, sampled: Routing | None, scored: Routing | None) -> RoutingRecords:
    """Both records of a rollout, and what the training forward replays of them.

    Raises:
      ValueError: the routing that is to be replayed was not recorded, or not its logits.
    """
    own = _replayed(config, scored, "scoring pass") if config.mode == "R2" else in_scoring(config, sampled)
    return RoutingRecords(sampled, scored, replayed=own)


def _replayed(config: ReplayConfig, recorded: Routing | None, source: str) -> Routing:
    """The experts of a record, and the router's logits where these are replayed."""
    if recorded is None:
        raise ValueError(
            f"replay needs the routing of the {source} and none was captured; record it or set replay.mode=off"
        )
    if config.what == "experts":
        return Routing(recorded.experts)
    if recorded.logits is None:
        raise ValueError(
            "replay.what='logits' and only experts were recorded; record logits or set replay.what=experts"
        )
    return recorded


def by_router(routing: Routing) -> Routing:
    """The experts chosen by the router, the top k of its logits; the recorded ones if there are no logits."""
    if routing.logits is None:
        return routing
    experts = experts_of(routing.logits, routing.experts.shape[-1])
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
