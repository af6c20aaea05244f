"""The best evaluation of a run so far: its checkpoint stays, and after a patience without a better one the run ends."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models import EXACT
from jaxrl_llm.records.run_log import read_json
from jaxrl_llm.rollout.pass_rate import RATES
from jaxrl_llm.run.blocks import CheckpointConfig, Settings

_PAIRS = ByName({"judged_names": "jaxrl_llm.training.pairs"})


def evaluated_keys(s: Settings) -> list[str]:
    """The metrics that every evaluation of a run writes, one number each."""
    names: list[str] = _PAIRS["judged_names"](s.objective) if s.objective.reads == "pairs" else []
    if not s.objective.learns_rewards:
        names += [*RATES, *(f"reward_{name}" for name in s.task.functions)]
        names += [] if s.rollout.router == EXACT else [f"sampler_{name}" for name in RATES]
    return [f"eval/{name}" for name in names]


@dataclasses.dataclass(frozen=True)
class Best:
    """The best value of `config.best` over the evaluations after the first step. Checkpoints have it, so that a resumed
    run counts on.

    value, step: of the best evaluation, None before the first finite value. waited: evaluations since it.
    """

    config: CheckpointConfig
    value: float | None = None
    step: int | None = None
    waited: int = 0

    @classmethod
    def resumed(cls, config: CheckpointConfig, saved: Mapping[str, Any] | None) -> "Best":
        """The best so far as a checkpoint has it; none yet where that was of another metric."""
        if saved is None or (saved["metric"], saved["mode"]) != (config.best, config.best_mode):
            return cls(config)
        return cls(config, saved["value"], saved["step"], saved["waited"])

    def saved(self) -> dict[str, Any]:
        """Return what `resumed` reads, as JSON holds it."""
        own = {"value": self.value, "step": self.step, "waited": self.waited}
        return {"metric": self.config.best, "mode": self.config.best_mode, **own}

    def after(self, step: int, metrics: Mapping[str, Any]) -> "Best":
        """The best after the evaluation of a step; an equal value is no better."""
        if not self.config.best:
            return self
        value, sign = metrics[self.config.best], 1 if self.config.best_mode == "max" else -1
        if math.isfinite(value) and (self.value is None or sign * value > sign * self.value):
            return Best(self.config, float(value), step)
        return dataclasses.replace(self, waited=self.waited + 1)

    @property
    def ends(self) -> bool:
        """True if the run ends early."""
        return 0 < self.config.early_stopping_patience <= self.waited

    def row(self) -> dict[str, Any]:
        """Return its entries in the row of an evaluation."""
        if not self.config.best:
            return {}
        return {"eval/best": self.value, "eval/best_step": self.step, "eval/since_best": self.waited}

    def result(self) -> dict[str, Any]:
        """Return the entries of result.json of a run that ended early, for `ended_early`."""
        return {"early_stopping": self.saved()} if self.ends else {}

    def __str__(self) -> str:
        found = "no value" if self.value is None else f"{self.value:.4g} at step {self.step}"
        return (
            f"{self.config.best} has not been better than {found} for {self.waited} evaluations "
            f"(checkpoint.early_stopping_patience={self.config.early_stopping_patience})"
        )


def ended_early(workdir: Path, config: CheckpointConfig) -> bool:
    """Return whether the run of a DIR has ended early, and would under this config."""
    saved = (read_json(workdir / "result.json") or {}).get("early_stopping")
    return Best.resumed(config, saved).ends
