"""Routing replay: which recorded routing a forward replays.

off  nothing is replayed.
R2   the routing of pi_old, recorded when the trainer scores the rollout, is replayed in training.
R3   the routing of the rollout engine is replayed in scoring and in training.

Replay acts in every MoE layer, on prompt and answer. The reference model, a separate critic and evaluation never
replay. Sources: R2 in GSPO, arXiv 2507.18071 section 5.3; R3 in arXiv 2510.11370.
"""

import dataclasses

from jaxrl_llm.ground.declared import Block, declared
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.training.routing_records import RoutingRecords

__all__ = ["ReplayConfig", "in_scoring", "prescribe"]


@dataclasses.dataclass(frozen=True)
class ReplayConfig(Block, prefix="replay."):
    """Routing replay, MoE only."""

    mode: str = declared("off", among={"off": "", "R2": "of the scoring pass", "R3": "of the rollout"})
    what: str = declared(
        "experts", among={"experts": "indices; gates follow the current router", "logits": "indices and gates"}
    )

    @property
    def records_logits(self) -> bool:
        return self.mode != "off" and self.what == "logits"


def in_scoring(config: ReplayConfig, sampled: Routing | None) -> Routing | None:
    """What the scoring pass of the old policy replays.

    Raises:
      ValueError: the rollout recorded no routing, or not its logits.
    """
    return _replayed(config, sampled, "rollout") if config.mode == "R3" else None


def prescribe(config: ReplayConfig, sampled: Routing | None, scored: Routing | None) -> RoutingRecords:
    """Both records of a rollout, and what the training forward replays of them.

    Raises:
      ValueError: the routing that is to be replayed was not recorded, or not its logits.
    """
    replayed = None
    if config.mode == "R2":
        replayed = _replayed(config, scored, "scoring pass")
    elif config.mode == "R3":
        replayed = _replayed(config, sampled, "rollout")
    return RoutingRecords(sampled, scored, replayed)


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
