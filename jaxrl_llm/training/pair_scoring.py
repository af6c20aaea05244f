"""Scores of many pairs by one state: the log-probs of the frozen start, and how held-out pairs are ordered."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Shaped

from jaxrl_llm.ground import processes, sharding
from jaxrl_llm.ground.array_typing import Array
from jaxrl_llm.objectives.calibration import calibrate
from jaxrl_llm.objectives.pair_objective import PairObjective
from jaxrl_llm.training.layout import UpdateConfig, lay_out
from jaxrl_llm.training.step import Learner

__all__ = ["computed_once", "judge", "score_rows"]

PerRow = Float[np.ndarray, "n t"]


def score_rows(
    learner: Learner,
    params: Any,
    batch: Mapping[str, Any],
    rows: int,
    updates: UpdateConfig,
    frozen: Any = None,
) -> PerRow:
    """What the objective makes scores of, `rows` rows at a time: log-probs, or the head's output after each token.

    Args:
      batch: tokens and segment_ids [n t], on the host.
      rows: of one program; the last rows are scored twice where it does not divide n.
    """
    values, padded = learner.objective.learns_rewards, dataclasses.replace(updates, layout="padded", length_buckets=1)
    count, time = batch["tokens"].shape
    parts = []
    for start in range(0, count, rows):
        taken = np.minimum(np.arange(start, start + rows), count - 1)
        lengths = (batch["segment_ids"][taken] != 0).sum(1)
        tokens = sharding.put_rows(batch["tokens"][taken], learner.model.mesh)
        into = learner.blank_scores(tokens, logprobs=not values, values=values)
        layout = lay_out(np.arange(rows), lengths, time, padded)
        scores = learner.score(params, tokens, None, layout, into=into, frozen=frozen)
        parts.append(np.asarray(processes.fetch(scores.state_values if values else scores.logprobs)))
    return np.concatenate(parts)[:count]


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
            with open(part, "wb") as file:
                np.save(file, array)
            os.replace(part, path)
        return array
    try:
        array = np.load(path)
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
    found = calibrate(rewards[:, 0] - rewards[:, 1])
    metrics: dict[str, Any] = {
        "eval/pair_accuracy": found.accuracy,
        "eval/pair_margin": float((rewards[:, 0] - rewards[:, 1]).mean()),
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


@functools.partial(jax.jit, static_argnums=0)
def _rewards(objective: PairObjective, arrays: Mapping[str, Shaped[Array, "n t"]]) -> Float[Array, "p 2"]:
    return objective.rewards(**arrays)
