"""A reward model in place of the rule: what `methods` and `overoptimisation` of sweep.py are made of.

good   600 steps of 64 pairs                 for the comparison of PPO, GRPO with two baselines, and GRPO with the rule
poor   6 steps of 32 pairs, each seen once   for what happens when a policy follows it too far
"""

from typing import Any

from experiments.preferences.start import SEEDS, START, named, own_answers, seeds
from jaxrl_llm.sweep import Sweep, each, product, zipped

__all__ = ["DPO", "methods", "models", "overoptimisation"]

MODELS = "runs/preferences/models"  # where `models` is run, and the other two look for the reward models
POLICY: dict[str, Any] = START | {
    "rollout.prompts": 64,
    "rollout.group_size": 4,
    "updates.minibatches": 4,
    "optimizer.learning_rate": 3e-4,
    "evaluation.every": 20,
}
DPO: dict[str, Any] = START | {"steps": 60, "rollout.prompts": 64, "evaluation.every": 20}
LEAVE_ONE_OUT: dict[str, Any] = {"objective.baseline": "leave_one_out", "objective.std": "none"}
MEASURED = 1e-6  # a KL coefficient that is measured and not felt
FIXED: dict[str, Any] = {"objective.kl_target": None}  # the coefficient of the KL inside the reward


def models() -> Sweep:
    arms = {"good": {"steps": 600, "rollout.prompts": 64}, "poor": {"steps": 6, "rollout.prompts": 32}}
    setting = START | {"evaluation.every": 1000, "evaluation.prompts": 512}
    runs = product(named(arms), [setting], seeds())
    return Sweep("How good are the reward models?", runs, "good", "configs/reward_model.py", minutes=1)


def _judged_by(model: str) -> list[dict[str, Any]]:
    """Every seed with the reward model of that seed."""
    return zipped(seeds(), each("rewards.reward_model", [f"{MODELS}/{model}/{seed}" for seed in SEEDS]))


def methods() -> Sweep:
    learnt = {"rewards.verifier_weight": 0.0, "rewards.missing_eos_penalty": 5.0, "objective.kl_coef": 0.04}
    arms = {
        "PPO, model": FIXED | {"config": "configs/ppo_rlhf.py", "objective.reward_kl_coef": 0.2},
        "GRPO, model": learnt | {"config": "configs/grpo.py"},
        "leave-one-out, model": learnt | LEAVE_ONE_OUT | {"config": "configs/grpo.py"},
    }
    setting = POLICY | {"steps": 80}
    rule = named({"GRPO, rule": {"config": "configs/grpo.py", "objective.kl_coef": MEASURED}})
    dpo = named({"DPO, own answers": {"config": "configs/dpo.py"}})
    runs = [
        *product(rule, [setting], seeds()),
        *product(named(arms), [setting], _judged_by("good")),
        *product(dpo, [DPO], own_answers()),
    ]
    return Sweep("Is a reward model as good as the rule that it learnt?", runs, "GRPO, rule", minutes=1)


def overoptimisation() -> Sweep:
    betas = {"no KL": MEASURED, "beta 0.01": 0.01, "beta 0.1": 0.1}
    arms = {name: FIXED | {"objective.reward_kl_coef": beta} for name, beta in betas.items()}
    arms["KL of 0.5"] = {"objective.reward_kl_coef": 0.1, "objective.kl_target": 0.5, "objective.kl_gain": 1.0}
    setting = POLICY | {"steps": 120, "rollout.prompts": 32}
    runs = product(named(arms), [setting], _judged_by("poor"))
    return Sweep("How far does a poor reward model carry?", runs, "no KL", "configs/ppo_rlhf.py", minutes=1)
