"""A reward model in place of the rule: what `methods` and `overoptimisation` of sweep.py are made of.

good   150 steps of 32 pairs                 for the comparison of PPO, GRPO and RLOO with GRPO with the rule
poor   6 steps of 32 pairs, each seen once   for what happens when a policy follows it too far
"""

from typing import Any

from experiments.preferences.start import SEEDS, START, named, seeds
from jaxrl_llm.sweep import Sweep, each, product, zipped

__all__ = ["methods", "models", "overoptimisation"]

MODELS = "runs/preferences/models"  # where `models` is run, and the other two look for the reward models
POLICY: dict[str, Any] = START | {
    "rollout.prompts": 32,
    "rollout.group_size": 4,
    "updates.minibatches": 4,
    "optimizer.learning_rate": 3e-4,
}
MEASURED = 1e-6  # a KL coefficient that is measured and not felt


def models() -> Sweep:
    arms = {"good": {"steps": 150}, "poor": {"steps": 6}}
    setting = START | {"rollout.prompts": 32, "evaluation.every": 1000, "evaluation.prompts": 512}
    runs = product(named(arms), [setting], seeds())
    return Sweep("How good are the reward models?", runs, "good", "configs/reward_model.py", minutes=1)


def _judged_by(model: str) -> list[dict[str, Any]]:
    """Every seed with the reward model of that seed."""
    return zipped(seeds(), each("rewards.reward_model", [f"{MODELS}/{model}/{seed}" for seed in range(SEEDS)]))


def methods() -> Sweep:
    kl, learnt = {"objective.kl_coef": MEASURED}, {"rewards.verifier_weight": 0.0}
    arms = {
        "PPO, model": learnt | {"config": "configs/ppo_rlhf.py"},
        "GRPO, model": learnt | kl | {"config": "configs/grpo.py"},
        "RLOO, model": learnt | kl | {"config": "configs/rloo.py"},
    }
    setting = POLICY | {"steps": 60, "evaluation.every": 60}
    rule = product(named({"GRPO, rule": kl | {"config": "configs/grpo.py"}}), [setting], seeds())
    runs = [*rule, *product(named(arms), [setting], _judged_by("good"))]
    return Sweep("Is a reward model as good as the rule that it learnt?", runs, "GRPO, rule", minutes=1)


def overoptimisation() -> Sweep:
    fixed = {"no KL": MEASURED, "beta 0.1": 0.1, "beta 0.4": 0.4}
    arms = {name: {"objective.reward_kl_coef": beta, "objective.kl_target": None} for name, beta in fixed.items()}
    arms["KL of 0.5"] = {"objective.reward_kl_coef": 0.1, "objective.kl_target": 0.5, "objective.kl_gain": 1.0}
    setting = POLICY | {"steps": 120, "evaluation.every": 120}
    runs = product(named(arms), [setting], _judged_by("poor"))
    return Sweep("How far does a poor reward model carry?", runs, "no KL", "configs/ppo_rlhf.py", minutes=1)
