"""How well a policy plays held-out episodes: drawn ones, and one of greedy answers for each prompt."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.phases import phase
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.episode_slots import traces
from jaxrl_llm.rollout.episodes import play
from jaxrl_llm.rollout.pass_rate import Evaluator
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.rollout.verification import VERIFIER
from jaxrl_llm.tasks.environments.continuation import Continuation

_RECORD = ByName({"records": "jaxrl_llm.rollout.episode_record", "write": "jaxrl_llm.rollout.episode_record"})


@dataclasses.dataclass(frozen=True)
class EpisodeEvaluator(Evaluator):
    """An evaluator whose answers are episodes; a rollout of drawn ones and a rollout of greedy ones.

    Raises:
      ValueError: the chat template has no continuation, or rewrites earlier turns.
    """

    record: Path | None = None  # a file for the episodes, in the form of verifiers: .jsonl, or .msgpack

    def __post_init__(self) -> None:
        Continuation(self.task).check()

    @property
    def places(self) -> np.ndarray:
        shards, count = sharding.shards("rows", self.model.mesh), len(self.prompts["uid"])
        return np.minimum(np.arange(count + -count % shards), count - 1)

    @property
    def engine(self) -> Engine:
        """The engine of the drawn episodes."""
        sampling, recorded = dataclasses.replace(self.sampling, greedy_last=False), self.record is not None
        return dataclasses.replace(
            super().engine,
            sampling=sampling,
            group_size=self.samples,
            record_routing=recorded and self.model.config.num_moe_layers > 0,
            record_kept=recorded and sampling.top_k > 0,
        )

    @property
    def _engines(self) -> tuple[Engine, Engine]:
        """Return the engines of drawn and of greedy episodes."""
        engine = self.engine
        greedy: dict[str, Any] = {"sampling": Sampling(temperature=0.0), "group_size": 1, "record_kept": False}
        return engine, dataclasses.replace(engine, **greedy)

    def traces(self, params: Any) -> list[jax.stages.Traced]:
        shape = len(self.places), self.prompts["tokens"].shape[1]
        return [one for engine in self._engines for one in traces(engine, params, self.task, *shape)]

    def _answered(self, params: Any) -> tuple[dict[str, np.ndarray], list[list[str]]]:
        batch, count = self.batch, len(self.prompts["uid"])
        prepared = self.engine.prepare(params)
        with phase("evaluating", count * (self.samples + 1)):
            played = [play(one, prepared, self.task, batch, jax.random.key(0)) for one in self._engines]
            self.engine.release(prepared, params)
        if self.record is not None:
            kept = (
                itertools.islice(_RECORD["records"](one, self.task, batch, engine), count * engine.group_size)
                for one, engine in zip(played, self._engines, strict=True)
            )
            _RECORD["write"](self.record, itertools.chain.from_iterable(kept))
        drawn, best = (one.judged for one in played)
        rewards = [given[VERIFIER].reshape(len(self.places), -1) for _, given, _ in (drawn, best)]
        texts = [[*drawn[0][i * self.samples : (i + 1) * self.samples], best[0][i]] for i in range(count)]
        return {VERIFIER: np.concatenate(rewards, axis=1)[:count]}, texts
