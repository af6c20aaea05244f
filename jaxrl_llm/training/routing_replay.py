"""Routing replay: who fills `TrainBatch.routing`, and how far two records of routing differ.

off  nothing is replayed.
R2   the routing of pi_old, recorded when the trainer scores the rollout, is replayed in training.
R3   the routing of the rollout engine is replayed in scoring and in training.

Replay acts in every MoE layer, on prompt and answer. The reference model, a separate critic and evaluation never
replay. Sources: R2 in GSPO, arXiv 2507.18071 section 5.3; R3 in arXiv 2510.11370.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm import metrics as M
from jaxrl_llm.array_typing import Array, Bool, Float, SegmentIds
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.routing import Routing, is_recorded, no_record, routing_dtype

__all__ = ["ReplayConfig", "blank", "check_recorded", "chosen", "differ", "flips", "in_scoring", "in_training"]


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    mode: str  # off | R2 | R3
    what: str  # experts (indices; gates follow the current router) | logits (indices and gates frozen)

    def __post_init__(self) -> None:
        if self.mode not in ("off", "R2", "R3"):
            raise ValueError(f"replay.mode={self.mode!r} is not one of off, R2, R3")
        if self.what not in ("experts", "logits"):
            raise ValueError(f"replay.what={self.what!r} is not one of experts, logits")

    @property
    def records_logits(self) -> bool:
        return self.mode != "off" and self.what == "logits"


def in_scoring(config: ReplayConfig, rollout: Routing | None) -> Routing | None:
    """What the old-log-prob pass replays."""
    return _kept(config, rollout) if config.mode == "R3" else None


def in_training(config: ReplayConfig, rollout: Routing | None, scored: Routing | None) -> Routing | None:
    """What the training forward replays."""
    return None if config.mode == "off" else _kept(config, scored if config.mode == "R2" else rollout)


def _kept(config: ReplayConfig, routing: Routing | None) -> Routing | None:
    if routing is None or config.what == "logits":
        if routing is not None and routing.logits is None:
            raise ValueError(
                "replay.what='logits' and only experts were recorded; record logits or set replay.what=experts"
            )
        return routing
    return routing.replace(logits=None)


def blank(config: ModelConfig, rows: int, time: int, logits: bool) -> Routing:
    """Room for the routing of a rollout, all "no record"."""
    dtype = routing_dtype(config.num_experts)
    shape = (config.num_moe_layers, rows, time)
    experts = jnp.full((*shape, config.num_experts_per_tok), jnp.iinfo(dtype).max, dtype)
    return Routing(experts, jnp.zeros((*shape, config.num_experts), jnp.float32) if logits else None)


def check_recorded(routing: Routing | None, segment_ids: SegmentIds, source: str) -> Float[Array, ""]:
    """How many (layer, token) pairs that were fed have no record; the last token of a row was never fed.

    Raises:
      ValueError: there is no record at all.
    """
    if routing is None:
        raise ValueError(
            f"replay needs the routing of the {source} and none was captured; record it or set replay.mode=off"
        )
    fed = jnp.concatenate([segment_ids[:, 1:] != 0, jnp.zeros_like(segment_ids[:, :1], bool)], axis=1)
    return jnp.sum(fed[None] & ~is_recorded(routing.experts), dtype=jnp.float32)


def differ(a: Routing, b: Routing) -> tuple[Float[Array, "l b t"], Bool[Array, "l b t"]]:
    """Share of a token's experts that are in a and not in b (a SET difference), and where both have a record."""
    same = a.experts.astype(jnp.int32)[..., :, None] == b.experts.astype(jnp.int32)[..., None, :]
    return 1 - jnp.mean(jnp.any(same, axis=-1), axis=-1), is_recorded(a.experts) & is_recorded(b.experts)


def chosen(routing: Routing) -> Routing:
    """What the router itself would choose, the top k of its logits; the given experts where there are none."""
    if routing.logits is None:
        return routing
    fresh = jax.lax.top_k(routing.logits, routing.experts.shape[-1])[1]
    recorded = is_recorded(routing.experts)[..., None]
    return Routing(jnp.where(recorded, fresh.astype(routing.experts.dtype), no_record(routing.experts)))


def flips(name: str, old: Routing, current: Routing, segment_ids: SegmentIds) -> dict[str, M.Metric]:
    """Share of activated experts that differ, in all and by layer.

    Where `current` carries the router's logits, their own top k counts (what it would choose), not what it was given.
    """
    current = chosen(current)
    share, both = differ(old, current)
    both = both & (segment_ids != 0)[None]
    by_layer = M.Mean(
        jnp.sum(share, axis=(1, 2), where=both, dtype=jnp.float32), jnp.sum(both, axis=(1, 2), dtype=jnp.float32)
    )
    return {name: M.Mean(jnp.sum(by_layer.total), jnp.sum(by_layer.count)), f"{name}_by_layer": by_layer}
