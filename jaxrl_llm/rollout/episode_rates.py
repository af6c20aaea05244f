"""How well a policy plays held-out episodes: drawn ones and a greedy one for each prompt."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.episode_slots import traces
from jaxrl_llm.rollout.episodes import play
from jaxrl_llm.rollout.pass_rate import Evaluator
from jaxrl_llm.rollout.verification import Judged
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.tasks.environments.reading import Continuation

_RECORD = ByName({"write": "jaxrl_llm.rollout.episode_record"})


@dataclasses.dataclass(frozen=True)
class EpisodeEvaluator(Evaluator):
    """An evaluator whose answers are episodes.

    Raises:
      ValueError: the chat template has no continuation, or rewrites earlier turns.
    """

    record: Path | None = None  # a file for the episodes, in the form of verifiers: .jsonl, or .msgpack

    def __post_init__(self) -> None:
        Continuation(self.task).check()

    @property
    def engine(self) -> Engine:
        recorded = self.record is not None
        kept = recorded and self.sampling.top_k > 0
        return dataclasses.replace(super().engine, record_routing=recorded, record_kept=kept)

    def traces(self, params: Any) -> list[jax.stages.Traced]:
        return traces(self.engine, params, self.task, len(self.places), self.prompts["tokens"].shape[1])

    def _judged(self, engine: Engine, weights: Any, batch: Prompts) -> Judged:
        rollout, table = play(engine, weights, self.task, batch, jax.random.key(0))
        if self.record is not None:
            _RECORD["write"](self.record, rollout, table.episodes, self.task, self.prompts, engine)
        return table.judged()
