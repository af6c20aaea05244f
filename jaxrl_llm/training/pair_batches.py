"""Batches of preference pairs, the log-probs of the frozen start, and what held-out pairs say of a state."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl_llm import tasks
from jaxrl_llm.ground import sharding
from jaxrl_llm.objectives.pair_objective import PairObjective
from jaxrl_llm.tasks.preference import (
    Pair,
    PairBatch,
    PairEncoder,
    PairSplits,
    PreferenceConfig,
    all_pairs,
    pair_stream,
)
from jaxrl_llm.training.layout import UpdateConfig, epochs_of
from jaxrl_llm.training.pair_scoring import computed_once, judge, score_rows
from jaxrl_llm.training.sources import Drawn
from jaxrl_llm.training.state import TrainBatch, TrainState
from jaxrl_llm.training.step import Learner

__all__ = ["PairReference", "Pairs"]


@dataclasses.dataclass(frozen=True)
class PairReference:
    """log pi_ref of every pair. train: by the pair's uid, its two rows [2 t]; test: the rows of all held-out pairs."""

    train: dict[int, Float[np.ndarray, "2 t"]]
    test: Float[np.ndarray, "n t"]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """A `Source` of pairs: rows 2 i and 2 i + 1 of a batch are the chosen and the rejected answer of pair i.

    Args:
      answer_length: most tokens of an answer, EOS included.
      pairs: a step.
      held_out: at most so many held-out pairs are evaluated.
      samples: held-out pairs that a person can read.
    """

    learner: Learner
    task: tasks.Task
    data: PreferenceConfig
    data_dir: str | None
    answer_length: int
    seed: int
    pairs: int
    updates: UpdateConfig
    held_out: int
    samples: int = 0

    @functools.cached_property
    def splits(self) -> PairSplits:
        task = self.task
        encoder = PairEncoder(task.tokenizer, task.prompt_length, self.answer_length, task.prompting)
        return self.data.read(task, encoder, self.data_dir)

    @functools.cached_property
    def _test(self) -> PairBatch:
        return all_pairs(self.splits.test, self.splits.encoder, limit=self.held_out)

    @functools.cached_property
    def _margins(self) -> bool:
        """Whether the pairs have margins of their own; those of a task have none."""
        return bool(self.data.file) and any(pair["margin"] for pair in self.splits.train)

    @property
    def _objective(self) -> PairObjective:
        assert isinstance(self.learner.objective, PairObjective)
        return self.learner.objective

    def stream(self) -> Any:
        return pair_stream(self.splits.train, self.splits.encoder, seed=self.seed, batch_size=self.pairs)

    def read_data(self) -> str:
        """Raises ValueError too where pairs have margins and the loss has no place for them."""
        if self._margins and not self._objective.loss.takes_margins:
            raise ValueError(
                f"preference.file={self.data.file!r} has margins, which a squared loss (ipo) has no place for; "
                "take them out, or use dpo"
            )
        return f"{self.splits.source}, {len(self._test['uid'])} of them evaluated"

    def reference(self, start: TrainState | None, frozen: Any, folder: Path) -> PairReference | None:
        """log pi_ref of all pairs, computed once in the order of the data: the start itself need not stay.

        Raises:
          ValueError: they are not in the folder, and there is no start to compute them with.
        """
        if "ref_logprobs" not in self._objective.needs:
            return None
        train, test = ([given[i] for i in range(len(given))] for given in (self.splits.train, self.splits.test))

        def kept(name: str, pairs: list[Pair]) -> np.ndarray:
            def compute() -> np.ndarray:
                if start is None:
                    raise ValueError(
                        f"{folder} lacks the log-probs of the start; give the training command again, which computes "
                        "them"
                    )
                parts = (pairs[i : i + self.pairs] for i in range(0, len(pairs), self.pairs))
                return np.concatenate([self._scored(start, frozen, self.splits.encoder.rows(part)) for part in parts])

            return computed_once(folder / f"{name}.npy", (2 * len(pairs), self._test["tokens"].shape[1]), compute)

        rows = kept("train", train).reshape(len(train), 2, -1)
        by_uid = {pair["uid"]: two for pair, two in zip(train, rows, strict=True)}
        return PairReference(by_uid, kept("test", test))

    def _scored(self, state: TrainState, frozen: Any, batch: Any) -> Float[np.ndarray, "n t"]:
        rows = 2 * self.pairs // self.updates.minibatches
        return score_rows(self.learner, state.params, batch, rows, self.updates, frozen)

    def next(
        self, stream: Any, step: int, state: TrainState, reference: Any, frozen: Any, exported: Callable[[], Any]
    ) -> Drawn:
        """One batch of pairs, with the log-probs of pi_ref where the objective reads them."""
        drawn: PairBatch = next(stream)
        mask = drawn["loss_mask"]
        epochs = epochs_of(
            drawn["segment_ids"],
            mask,
            2,
            self.answer_length,
            self.updates,
            seed=self.seed,
            step=step,
            together=2,
        )
        labels = np.tile(np.array([1.0, -1.0], np.float32), self.pairs)
        arrays = {"tokens": drawn["tokens"], "segment_ids": drawn["segment_ids"], "loss_mask": mask}
        arrays["advantages"] = np.where(mask, labels[:, None], 0)
        if reference is not None:
            arrays["ref_logprobs"] = np.concatenate([reference.train[uid] for uid in drawn["uid"].tolist()])
        if self._margins:
            arrays["margins"] = np.where(mask, np.repeat(drawn["margins"], 2)[:, None], 0)
        return Drawn(TrainBatch(**sharding.put_rows(arrays, self.learner.model.mesh)), epochs)

    def evaluate(self, state: TrainState, reference: Any, frozen: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Accuracy, margins and calibration on the held-out pairs."""
        test, found = self._test, self._scored(state, frozen, self._test)
        given = {"scores": found} if self._objective.learns_rewards else {"logprobs": found}
        if reference is not None:
            given["ref_logprobs"] = reference.test[: len(found)]
        metrics, rewards = judge(self._objective, mask=test["loss_mask"], **given)
        rows = [
            {
                "prompt": test["prompt"][i],
                "chosen": test["chosen"][i],
                "rejected": test["rejected"][i],
                "reward_chosen": float(rewards[i, 0]),
                "reward_rejected": float(rewards[i, 1]),
            }
            for i in range(min(self.samples, len(rewards)))
        ]
        return metrics, rows
