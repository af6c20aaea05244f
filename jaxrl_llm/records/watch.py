"""Warnings that the rows of a run give while it goes on.

A warning is a name and a text. Which ones hold follows from the rows alone, so that a run that resumes reads its own
rows and goes on watching.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

PAGE = "docs/reward_does_not_rise.md"  # from what a user sees to the field to change
ROLLOUTS = 10  # in a row, before anything is said
_FALL = 0.1  # of the best reward
MOVED = 0.1  # the least of `update/moved`
TEXTS = {
    "rewards_zero": f"the verifier gave 0 to every answer of {ROLLOUTS} rollouts in a row, which teaches nothing; read "
    "samples.jsonl, then take an easier task, a warm start or a larger rollout.max_new_tokens",
    "verifier_fails": "the verifier failed (it raised, or was killed at a limit) and gave no answer of the rollout a "
    "reward; read what went wrong in samples.jsonl, then correct it or raise its time_limit",
    "rewards_equal": f"all rewards of a rollout were equal, {ROLLOUTS} rollouts in a row, which teaches nothing; read "
    "samples.jsonl, then take a harder task or a verifier that tells answers apart",
    "reward_collapse": f"the mean reward was below {_FALL:g} of its best, {ROLLOUTS} rollouts in a row; go back to "
    "an earlier checkpoint with a lower optimizer.learning_rate, a stronger clip or a KL",
    "updates_rounded": f"update/moved is below {MOVED:g}: rounding undoes most of every update, and the policy hardly "
    "learns; set model.param_dtype=float32 where it is bfloat16, or raise optimizer.learning_rate",
}


class Collapse:
    """Follows the mean reward of every rollout and knows when a run has collapsed.

    That is when the mean reward is not finite, or `patience` rollouts in a row were below `share` of the highest mean
    of `patience` rewards in a row so far (at the start: of as many as there are). A mean sets the bar because in a long
    run of few prompts a single high reward is chance.
    """

    def __init__(self, share: float, patience: int):
        self._share, self._patience = share, patience
        self._recent: deque[float] = deque(maxlen=patience)
        self._below = 0
        self.best = -math.inf

    def after(self, reward: float) -> bool:
        """Return True if the run has collapsed at its next rollout, which has this mean reward."""
        if not math.isfinite(reward):
            return True
        self._recent.append(reward)
        self.best = max(self.best, float(np.mean(self._recent)))
        self._below = self._below + 1 if reward < self._share * self.best else 0
        return self._below >= self._patience


class Watch:
    """Reads the rows of metrics.jsonl one after the other."""

    def __init__(self) -> None:
        self._collapse = Collapse(_FALL, ROLLOUTS)
        self._zero = self._equal = 0  # rollouts in a row
        self._holding: dict[str, bool] = {}

    def after(self, row: Mapping[str, Any]) -> dict[str, str]:
        """The warnings that hold after this row, by name."""
        self._of_rewards(row)
        if row.get("update/moved") is not None:
            self._holding["updates_rounded"] = row["update/moved"] < MOVED
        return {name: TEXTS[name] for name, holds in self._holding.items() if holds}

    def _of_rewards(self, row: Mapping[str, Any]) -> None:
        """Read the rewards; a row without rewards of a verifier changes nothing."""
        mean, spread = row.get("reward/mean"), row.get("reward/std")
        if mean is None or spread is None or "reward/verifier_weighted" not in row:
            return
        equal = spread <= 1e-6 * abs(mean)  # float32 rounds the mean of equal numbers
        self._equal = self._equal + 1 if equal else 0
        self._zero = self._zero + 1 if equal and mean == 0 else 0
        fell = self._collapse.after(mean) and self._collapse.best > 0  # costs have no bar to fall below
        zero = self._zero >= ROLLOUTS
        failed = row.get("reward/verifier_errors", 0) + row.get("reward/verifier_timeouts", 0)
        self._holding |= {
            "verifier_fails": failed > 0 and equal and mean == 0,
            "rewards_zero": zero,
            "rewards_equal": self._equal >= ROLLOUTS and not zero,
            "reward_collapse": fell,
        }
