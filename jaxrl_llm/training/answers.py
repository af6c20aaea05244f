"""Batches of given answers, for supervised training: by itself, and as the warm start of other runs."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxrl_llm import sharding, tasks
from jaxrl_llm.training.layout import UpdateConfig, epochs_of
from jaxrl_llm.training.sources import Drawn, start_policy
from jaxrl_llm.training.state import TrainBatch, TrainState
from jaxrl_llm.training.step import Learner

__all__ = ["Answers"]


@dataclasses.dataclass(frozen=True)
class Answers:
    """A `Source` of the task's own answers; every one of them is imitated, so its advantage is 1.

    Args:
      answers: a step, one to each prompt.
    """

    learner: Learner
    task: tasks.Task
    data_dir: str | None
    seed: int
    answers: int
    updates: UpdateConfig

    def stream(self) -> tasks.SupervisedStream:
        return tasks.supervised(self.task, "train", seed=self.seed, batch_size=self.answers, data_dir=self.data_dir)

    def read_data(self) -> str:
        next(self.stream())
        return ""

    def reference(self, start: TrainState | None, frozen: Any, folder: Path) -> Any:
        return start_policy(self.learner, start, frozen, folder)

    def next(
        self, stream: Any, step: int, state: TrainState, reference: Any, frozen: Any, exported: Callable[[], Any]
    ) -> Drawn:
        """One batch of answers, with the log-probs of pi_ref where the objective reads them."""
        drawn = next(stream)
        epochs = epochs_of(
            drawn["segment_ids"],
            drawn["loss_mask"],
            1,
            self.task.answer_length,
            self.updates,
            seed=self.seed,
            step=step,
        )
        given = (drawn["tokens"], drawn["segment_ids"], drawn["loss_mask"])
        tokens, segment_ids, mask = sharding.put_rows(given, self.learner.model.mesh)
        batch = TrainBatch(tokens, segment_ids, mask, advantages=mask.astype(jnp.float32))
        if reference is not None:
            into = self.learner.blank_scores(tokens)
            for layout in epochs[0]:
                into = self.learner.score(reference, tokens, None, layout, into=into, frozen=frozen)
            batch = batch.replace(ref_logprobs=into.logprobs)
        return Drawn(batch, epochs)

    def evaluate(self, state: TrainState, reference: Any, frozen: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Nothing beside the pass rates, which every policy has."""
        return {}, []
