"""Effects of stale answers, and of a correction or the recorded routing on them: lags of 0 to 8 in pairs.

    python -m jaxrl_llm.sweep --sweep experiments/lag/sweep.py:lag --workdir runs/lag
    python -m jaxrl_llm.report runs/lag

VARIANTS has the variants and what each decides, in one line; protocol.md has the hypotheses. A condition is
a recipe at a rate and its arms are lags, so that the runs of a pair differ in the lag alone; the baseline has none.
`lag@GSPO,tuned` is the part of one recipe at one rate: the whole goes on in its DIR.
"""

import json
from pathlib import Path
from typing import Any

from experiments.routing_replay.negatives import condition
from experiments.routing_replay.sweep import ARMS, CONFIG, seeds
from experiments.routing_replay.variants import Variants, variant_of
from jaxrl_llm.sweep import Sweep, product

LAGS = (0, 1, 2, 4, 8)
HIGH = 4e-4  # where arms of the study of routing replay part at N = 8
# What is done about answers of an older policy; another one is a line.
REMEDIES: dict[str, dict[str, Any]] = {
    "": {},
    "+decoupled": {"objective.correction": "decoupled"},
}
REPLAYS: dict[str, dict[str, Any]] = {"": {}, "+R3": {"replay.mode": "R3"}}


def lags(*values: int) -> list[dict[str, Any]]:
    return [{"arm": f"lag {value}" if value else "no lag", "rollout.lag": value} for value in values]


def recipes(*names: str) -> list[dict[str, Any]]:
    """Every recipe at the rate that was tuned for it without a lag, with a replay for that, and at one for all."""
    path = Path(__file__).parents[1] / "routing_replay" / "tuned.json"
    tuned = json.loads(path.read_text())["N = 8"]
    return [
        {**ARMS[name], **remedy, **replay}
        | condition(f"{name}{corrected}{replayed}", told, optimizer__learning_rate=rate)
        for name in names
        for corrected, remedy in REMEDIES.items()
        for replayed, replay in REPLAYS.items()
        for told, rate in (("tuned", tuned.get(name + replayed, tuned[name])), ("high rate", HIGH))
    ]


def lag() -> Sweep:
    setting = {"updates.minibatches": 8, "steps": 30, "evaluation.every": 15, "checkpoint.every": 30}
    runs = product(recipes("GRPO", "GSPO", "SAPO"), lags(*LAGS), [setting], seeds(900, 10))
    return Sweep("", runs, baseline="no lag", config=CONFIG, minutes=0.4)


def lag_smoke() -> Sweep:
    short = {"steps": 3, "warm_start.steps": 50}
    runs = product(recipes("GRPO"), lags(0, 2), [short], seeds(790, 1))
    runs = [run for run in runs if run["condition"] == "GRPO+decoupled+R3, high rate"]
    return Sweep("", runs, baseline="no lag", config=f"{CONFIG}:smoke", minutes=0.5)


VARIANTS: Variants = {
    "lag": (lag, "How much does each recipe lose by answers that are 1, 2, 4 and 8 policies old?"),
    "lag_smoke": (lag_smoke, "Do runs with a lag run? Three rollouts of a tiny model"),
}


def get_sweep(variant: str = "lag") -> Sweep:
    return variant_of(VARIANTS, variant)
