"""Batches of preference pairs, the log-probs of the frozen start, and how held-out pairs are ordered."""

import dataclasses
import functools
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Shaped

from jaxrl_llm import tasks
from jaxrl_llm.ground import processes, sharding
from jaxrl_llm.ground.array_typing import Array
from jaxrl_llm.objectives.calibration import calibrate
from jaxrl_llm.objectives.pair_objective import PairObjective
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.tasks.preference import (
    Pair,
    PairBatch,
    PairEncoder,
    PairSplits,
    PreferenceConfig,
    all_pairs,
    pair_stream,
    read_splits,
)
from jaxrl_llm.training.collect import Draw
from jaxrl_llm.training.layout import UpdateConfig, epochs_of, lay_out
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.sources import Source
from jaxrl_llm.training.state import TrainState
from jaxrl_llm.training.step import Learner


@dataclasses.dataclass(frozen=True)
class PairData:
    """The pairs of a run, read once."""

    task: tasks.Task
    source: PreferenceConfig
    data_dir: str | None
    answer_length: int  # most tokens of an answer, EOS included
    held_out: int  # at most so many held-out pairs are evaluated

    @functools.cached_property
    def splits(self) -> PairSplits:
        task = self.task
        encoder = PairEncoder(task.tokenizer, task.prompt_length, self.answer_length, task.prompting)
        return read_splits(self.source, task, encoder, self.data_dir)

    @functools.cached_property
    def test(self) -> PairBatch:
        return all_pairs(self.splits.test, self.splits.encoder, limit=self.held_out)

    @functools.cached_property
    def have_margins(self) -> bool:
        """True if the pairs have margins of their own; those of a task have none."""
        return bool(self.source.file) and any(pair["margin"] for pair in self.splits.train)


@dataclasses.dataclass(frozen=True)
class Pairs(Source):
    """A `Source` of pairs: rows 2 i and 2 i + 1 of a batch are the chosen and the rejected answer of pair i."""

    learner: Learner
    data: PairData
    seed: int
    pairs: int  # a step
    updates: UpdateConfig
    samples: int = 0  # held-out pairs that a person can read
    reference: dict[int, Float[np.ndarray, "2 t"]] | None = None  # log pi_ref, by uid of the pairs to learn from
    held_out_reference: Float[np.ndarray, "n t"] | None = None

    @property
    def _objective(self) -> PairObjective:
        assert isinstance(self.learner.objective, PairObjective)
        return self.learner.objective

    def stream(self) -> Any:
        splits = self.data.splits
        return pair_stream(splits.train, splits.encoder, seed=self.seed, batch_size=self.pairs)

    def read_data(self) -> str:
        """Raises ValueError too where pairs have margins and the loss has no place for them."""
        if self.data.have_margins and not self._objective.loss.takes_margins:
            raise ValueError(
                f"preference.file={self.data.source.file!r} has margins, which a squared loss (ipo) has no place for; "
                "take them out, or use dpo"
            )
        return f"{self.data.splits.source}, {len(self.data.test['uid'])} of them evaluated"

    def started(self, start: TrainState | None, folder: Path | None) -> "Pairs":
        """With log pi_ref of all pairs, computed once in the order of the data: the start itself need not stay.

        Raises:
          ValueError: they are not in the folder, and there is no start to compute them with.
        """
        if "ref_logprobs" not in self._objective.needs:
            return self
        splits, width = self.data.splits, self.data.test["tokens"].shape[1]
        train, test = ([given[i] for i in range(len(given))] for given in (splits.train, splits.test))

        def kept(name: str, pairs: list[Pair]) -> np.ndarray:
            def compute() -> np.ndarray:
                if start is None:
                    raise ValueError(
                        f"{folder} lacks the log-probs of the start; give the training command again, which computes "
                        "them"
                    )
                parts = (pairs[i : i + self.pairs] for i in range(0, len(pairs), self.pairs))
                return np.concatenate([self._scored(start.policy, splits.encoder.rows(part)) for part in parts])

            if folder is None:
                return compute()
            return computed_once(folder / f"{name}.npy", (2 * len(pairs), width), compute)

        rows = kept("train", train).reshape(len(train), 2, -1)
        by_uid = {pair["uid"]: two for pair, two in zip(train, rows, strict=True)}
        return dataclasses.replace(self, reference=by_uid, held_out_reference=kept("test", test))

    def _scored(self, policy: Policy, batch: Mapping[str, Any]) -> Float[np.ndarray, "n t"]:
        """Return what the objective makes scores of: log-probs, or the head's output after each token.

        As many rows at a time as a minibatch has; the last ones are scored twice where that does not divide n.
        """
        wanted = "state_values" if self.learner.objective.learns_rewards else "logprobs"
        updates = dataclasses.replace(self.updates, layout="padded", length_buckets=1)
        rows, (count, time) = 2 * self.pairs // updates.minibatches, batch["tokens"].shape
        parts = []
        for start in range(0, count, rows):
            taken = np.minimum(np.arange(start, start + rows), count - 1)
            lengths = (batch["segment_ids"][taken] != 0).sum(1)
            arrays = {name: batch[name][taken] for name in ("tokens", "segment_ids", "loss_mask")}
            answers = Rollout(**sharding.put_rows(arrays, self.learner.model.mesh))
            layout = lay_out(np.arange(rows), lengths, time, updates)
            scores = self.learner.score(policy, answers, [layout], {wanted})
            parts.append(np.asarray(processes.fetch(scores[wanted])))
        return np.concatenate(parts)[:count]

    def next(self, stream: Any, step: int, state: TrainState) -> Draw:
        drawn: PairBatch = next(stream)
        mask, longest = drawn["loss_mask"], self.data.answer_length
        epochs = epochs_of(drawn["segment_ids"], mask, 2, longest, self.updates, seed=self.seed, step=step, together=2)
        labels = np.tile(np.array([1.0, -1.0], np.float32), self.pairs)
        arrays = {"tokens": drawn["tokens"], "segment_ids": drawn["segment_ids"], "loss_mask": mask}
        arrays["advantages"] = np.where(mask, labels[:, None], 0)
        if self.reference is not None:
            arrays["ref_logprobs"] = np.concatenate([self.reference[uid] for uid in drawn["uid"].tolist()])
        if self.data.have_margins:
            arrays["margins"] = np.where(mask, np.repeat(drawn["margins"], 2)[:, None], 0)
        return Draw(Rollout(**sharding.put_rows(arrays, self.learner.model.mesh)), epochs)

    def evaluate(self, state: TrainState) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Accuracy, margins and calibration on the held-out pairs."""
        test = self.data.test
        found = self._scored(state.policy, test)
        given = {"scores": found} if self._objective.learns_rewards else {"logprobs": found}
        if self.held_out_reference is not None:
            given["ref_logprobs"] = self.held_out_reference[: len(found)]
        metrics, rewards = judge(self._objective, mask=test["loss_mask"], **given)
        rows = [
            {name: test[name][i] for name in ("prompt", "chosen", "rejected")}
            | {"reward_chosen": float(rewards[i, 0]), "reward_rejected": float(rewards[i, 1])}
            for i in range(min(self.samples, len(rewards)))
        ]
        return metrics, rows


def computed_once(path: Path, shape: tuple[int, ...], compute: Callable[[], np.ndarray]) -> np.ndarray:
    """The array of a file, which is computed and written first if it is not there; written by the first process.

    Raises:
      ValueError: the file holds something else.
    """
    if not processes.everywhere(path.exists()):
        array = compute()
        if jax.process_index() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.part")
            content = io.BytesIO()
            np.save(content, array)
            part.write_bytes(content.getvalue())
            part.replace(path)
        return array
    try:
        array = np.load(io.BytesIO(path.read_bytes()))
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, and it is computed again") from error
    if array.shape != shape:
        raise ValueError(f"{path} holds {array.shape} and not {shape}; remove it, and it is computed again")
    return array


def judge(objective: PairObjective, **arrays: Any) -> tuple[dict[str, Any], Float[np.ndarray, "p 2"]]:
    """How pairs are ordered and how far sigma(margin) can be believed; and the rewards, chosen first.

    Args:
      arrays: as for `PairObjective.rewards`, of rows chosen, rejected, chosen, ...
    """
    rewards = np.asarray(_rewards(objective, arrays), np.float64)
    margins = rewards[:, 0] - rewards[:, 1]
    found = calibrate(margins)
    metrics: dict[str, Any] = {
        "eval/pair_accuracy": found.accuracy,
        "eval/pair_margin": float(margins.mean()),
        "eval/reward_chosen": float(rewards[:, 0].mean()),
        "eval/reward_rejected": float(rewards[:, 1].mean()),
        "eval/brier": found.brier,
        "eval/calibration_error": found.expected_error,
        "eval/reliability_confidence": found.bin_confidence.tolist(),
        "eval/reliability_accuracy": found.bin_accuracy.tolist(),
        "eval/reliability_pairs": found.bin_pairs.tolist(),
    }
    if "logprobs" in objective.needs:
        sums = np.sum(arrays["logprobs"], axis=1, where=arrays["mask"]).reshape(-1, 2).mean(0)
        metrics |= {"eval/logprob_chosen": float(sums[0]), "eval/logprob_rejected": float(sums[1])}
    return metrics, rewards


def judged_names(objective: PairObjective) -> list[str]:
    """Names behind "eval/" of the single numbers that `judge` finds."""
    names = ["pair_accuracy", "pair_margin", "reward_chosen", "reward_rejected", "brier", "calibration_error"]
    return names + ["logprob_chosen", "logprob_rejected"] * ("logprobs" in objective.needs)


@functools.partial(jax.jit, static_argnums=0)
def _rewards(objective: PairObjective, arrays: Mapping[str, Shaped[Array, "n t"]]) -> Float[Array, "p 2"]:
    return objective.rewards(**arrays)
