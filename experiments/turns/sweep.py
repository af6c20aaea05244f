"""GRPO, GSPO and PPO on the two games of several turns, in pairs of five seeds.

    python -m jaxrl_llm.sweep --sweep experiments/turns/sweep.py:guess --workdir runs/turns/guess
    python -m jaxrl_llm.sweep --sweep experiments/turns/sweep.py:calculator --workdir runs/turns/calculator

guess        80 rollouts after a warm start on uniform guesses
calculator   60 rollouts after a warm start of which half of the calls are wrong or missing; PPO also at 2e-4, because
             it fell on three of five seeds at 5e-4, the rate of all others; expected before the runs: all five end
             above 0.9
smoke        three rollouts of `guess`
"""

from typing import Any

from jaxrl_llm.sweep import Sweep, each, product

METHODS: dict[str, dict[str, Any]] = {  # the three configs, as fields
    "GRPO": {"objective.name": "grpo"},
    "GSPO": {"objective.name": "gspo", "objective.clip_low": 8e-3, "objective.clip_high": 1e-2},
    "PPO": {"objective.name": "ppo", "critic.kind": "head", "objective.value_coef": 0.1},
}
SLOWER = {"PPO, 2e-4": METHODS["PPO"] | {"optimizer.learning_rate": 2e-4}}
SETTING = {"evaluation.every": 20, "checkpoint.every": 10_000, "log.diagnostics_every": 0}
SIZES = {
    "guess": {"steps": 80},
    "calculator": {"steps": 60, "warm_start.steps": 400},
    "smoke": {"steps": 3, "warm_start.steps": 20},
}


def get_sweep(variant: str = "guess") -> Sweep:
    if variant not in SIZES:
        raise ValueError(f"unknown variant {variant!r}; it has guess, calculator and smoke")
    game, size = ("guess", "_grpo_smoke") if variant == "smoke" else (variant, "")
    methods = METHODS | (SLOWER if game == "calculator" else {})
    arms = [{"arm": name, **own} for name, own in methods.items()]
    runs = product(arms, [SETTING | SIZES[variant]], each("seed", range(1 if size else 5)))
    return Sweep(f"Which method learns {game}?", runs, "GRPO", f"configs/turns.py:{game}{size}", minutes=3)
