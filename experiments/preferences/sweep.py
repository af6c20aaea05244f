"""Pairs of answers: how right a reward model is, and what DPO needs to raise the share of right answers.

    python -m jaxrl_llm.sweep --sweep experiments/preferences/sweep.py:noise --workdir runs/preferences/noise
    python -m jaxrl_llm.sweep --sweep experiments/preferences/sweep.py:dpo --workdir runs/preferences/dpo
    python -m jaxrl_llm.report runs/preferences/dpo

noise              a reward model of clean pairs, and one of pairs of which 20 % are swapped
dpo                pairs made of the task, and pairs of the start's own answers (written first, by own_pairs.py)
models             the reward models of the next two; the DIR must be runs/preferences/models
methods            PPO, GRPO and its leave-one-out form with a good reward model, DPO, GRPO with the rule
overoptimisation   PPO with a poor one: no KL in the reward, two coefficients, one that is steered
"""

from typing import Any

from experiments.preferences import rlhf
from experiments.preferences.start import START, named, own_answers, seeds
from jaxrl_llm.sweep import Sweep, product


def get_sweep(variant: str = "dpo") -> Sweep:
    if variant == "noise":
        arms: dict[str, dict[str, Any]] = {"clean": {}, "20 % swapped": {"preference.label_noise": 0.2}}
        setting = START | {"steps": 150, "rollout.prompts": 32, "evaluation.every": 50, "evaluation.prompts": 512}
        runs = product(named(arms), [setting], seeds())
        question = "How right is a reward model, and what do swapped labels do to it?"
        return Sweep(question, runs, "clean", "configs/reward_model.py", minutes=1)
    if variant == "dpo":
        setting = rlhf.DPO
        runs = [
            *product(named({"DPO, pairs of the task": {}}), [setting], seeds()),
            *product(named({"DPO, own answers": {}}), [setting], own_answers()),
        ]
        question = "Does DPO raise the share of right answers, and whose answers must the pairs be?"
        return Sweep(question, runs, "DPO, pairs of the task", "configs/dpo.py", minutes=1)
    made = {"models": rlhf.models, "methods": rlhf.methods, "overoptimisation": rlhf.overoptimisation}
    if variant in made:
        return made[variant]()
    raise ValueError(f"unknown variant {variant!r}; it has noise, dpo, models, methods and overoptimisation")
