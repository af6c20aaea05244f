"""Batches of given answers, for supervised training: by itself, and as the warm start of other runs."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxrl_llm import tasks
from jaxrl_llm.ground import sharding
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.training.collect import Draw
from jaxrl_llm.training.layout import UpdateConfig, epochs_of
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.sources import Source, with_reference
from jaxrl_llm.training.state import TrainState
from jaxrl_llm.training.step import Learner

if TYPE_CHECKING:
    from jaxrl_llm.training.pairs import PairData


@dataclasses.dataclass(frozen=True)
class Answers(Source):
    """A `Source` of given answers; every one of them is imitated, so its advantage is 1."""

    learner: Learner
    task: tasks.Task
    data_dir: str | None
    seed: int
    answers: int  # a step, one to each prompt
    updates: UpdateConfig
    data: "PairData | None" = None  # whose chosen answers are the given ones; None: the task's own are
    reference: Policy | None = None
    reference_dtype: str = "float32"

    def stream(self) -> tasks.PromptStream:
        if self.data is None:
            return tasks.supervised(self.task, "train", seed=self.seed, batch_size=self.answers, data_dir=self.data_dir)
        pairs = self.data.splits
        return tasks.batches(pairs.train, pairs.encoder.chosen, self.seed, self.answers)

    def read_data(self) -> str:
        next(self.stream())
        return "" if self.data is None else f"the chosen answers of {self.data.splits.source}"

    def started(self, start: TrainState | None, folder: Path | None) -> "Answers":
        return with_reference(self, self.learner.objective, start, folder)

    def next(self, stream: Any, step: int, state: TrainState) -> Draw:
        drawn = next(stream)
        given = (drawn["tokens"], drawn["segment_ids"], drawn["loss_mask"])
        epochs = epochs_of(*given[1:], 1, self.task.answer_length, self.updates, seed=self.seed, step=step)
        tokens, segment_ids, mask = sharding.put_rows(given, self.learner.model.mesh)
        rollout = Rollout(tokens, segment_ids, mask, advantages=mask.astype(jnp.float32))
        if self.reference is not None:
            scores = self.learner.score(self.reference, rollout, epochs[0], {"logprobs"})
            rollout = rollout.replace(ref_logprobs=scores["logprobs"])
        return Draw(rollout, epochs)
