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

import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float, SegmentIds
from jaxrl_llm.ground.declared import Block, declared
from jaxrl_llm.models import Routing, is_recorded
from jaxrl_llm.models.scoring import following
from jaxrl_llm.rollout.rollout import Routes


@dataclasses.dataclass(frozen=True)
class ReplayConfig(Block, prefix="replay."):
    """Routing replay, MoE only."""

    mode: str = declared("off", among={"off": "", "R2": "of the scoring pass", "R3": "of the rollout"})
    what: str = declared(
        "experts", among={"experts": "indices; gates follow the current router", "logits": "indices and gates"}
    )


def in_scoring(config: ReplayConfig, sampled: Routing | None) -> Routing | None:
    """Return what the scoring pass of the old policy replays; raises as `prescribe`."""
    return _replayed(config, sampled, "rollout") if config.mode == "R3" else None


def prescribe(config: ReplayConfig, routes: Routes) -> Routes:
    """The records of a rollout with the one that the training forward replays.

    Raises:
      ValueError: the routing that is to be replayed was not recorded, or not its logits.
    """
    if config.mode == "R2":
        return routes.replace(replayed=_replayed(config, routes.scored, "scoring pass"))
    return routes.replace(replayed=in_scoring(config, routes.sampled))


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
    return recorded.replace(chosen=None)


def count_unrecorded(routing: Routing, segment_ids: SegmentIds) -> Float[Array, ""]:
    """How many (layer, token) pairs that were fed have no record; the last token of a row was never fed."""
    fed = following(segment_ids != 0)
    return jnp.sum(fed[None] & ~is_recorded(routing.experts), dtype=jnp.float32)
