"""A reward model in place of the rule: PPO, GRPO and RLOO against GRPO with the rule, and too much of it.

    python -m jaxrl_llm.sweep --sweep experiments/preferences/rlhf.py:models --workdir runs/preferences/models
    python -m jaxrl_llm.sweep --sweep experiments/preferences/rlhf.py:methods --workdir runs/preferences/methods
    python -m jaxrl_llm.sweep --sweep experiments/preferences/rlhf.py:overoptimisation --workdir runs/preferences/over
    python -m jaxrl_llm.report runs/preferences/methods
    python -m jaxrl_llm.report runs/preferences/over     # figures/reward_against_kl.png

models             the reward models of the other two: `good` saw 4800 pairs, `poor` 192; three seeds
methods            PPO, GRPO and RLOO with the good model, GRPO with the rule, from one warm start a seed
overoptimisation   PPO with the poor model, twice as long: no KL in the reward, two coefficients, one that is steered
"""

from typing import Any

from jaxrl_llm.sweep import Sweep, each, product, zipped

MODELS = "runs/preferences/models"  # where the last two look for what the first one trained
SEEDS = 3
START: dict[str, Any] = {
    "task.options": {"digits": 6, "train_size": 4096, "test_size": 512},
    "model.num_experts": 0,
    "model.num_hidden_layers": 2,
    "warm_start.steps": 400,
    "warm_start.target_pass_rate": 0.4,
    "checkpoint.every": 10_000,
    "log.diagnostics_every": 0,
    "evaluation.prompts": 256,
}
POLICY: dict[str, Any] = START | {
    "rollout.prompts": 32,
    "rollout.group_size": 4,
    "updates.minibatches": 4,
    "optimizer.learning_rate": 3e-4,
}
MEASURED = 1e-6  # a KL coefficient that is measured and not felt


def named(arms: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"arm": name, **fields} for name, fields in arms.items()]


def seeds(model: str = "") -> list[dict[str, Any]]:
    """A seed changes the warm start and the reward model too."""
    both = zipped(each("seed", range(SEEDS)), each("warm_start.seed", range(SEEDS)))
    if not model:
        return both
    return zipped(both, each("rewards.reward_model", [f"{MODELS}/{model}/{seed}" for seed in range(SEEDS)]))


def get_sweep(variant: str = "methods") -> Sweep:
    if variant == "models":
        arms = {"good": {"steps": 150}, "poor": {"steps": 6}}
        runs = product(named(arms), [START | {"rollout.prompts": 32, "evaluation.every": 10_000}], seeds())
        return Sweep("How good are the reward models?", runs, "good", "configs/reward_model.py", minutes=1)
    if variant == "methods":
        kl = {"objective.kl_coef": MEASURED}
        learnt = {"rewards.verifier_weight": 0.0}
        arms = {
            "PPO, model": learnt | {"config": "configs/ppo_rlhf.py"},
            "GRPO, model": learnt | kl | {"config": "configs/grpo.py"},
            "RLOO, model": learnt | kl | {"config": "configs/rloo.py"},
        }
        setting = POLICY | {"steps": 60, "evaluation.every": 60}
        rule = product(named({"GRPO, rule": kl | {"config": "configs/grpo.py"}}), [setting], seeds())
        runs = [*rule, *product(named(arms), [setting], seeds("good"))]
        return Sweep("Is a reward model as good as the rule that it learnt?", runs, "GRPO, rule", minutes=1)
    if variant == "overoptimisation":
        fixed = {"no KL": MEASURED, "beta 0.1": 0.1, "beta 0.4": 0.4}
        arms = {name: {"objective.reward_kl_coef": beta, "objective.kl_target": None} for name, beta in fixed.items()}
        arms["KL of 0.5"] = {"objective.reward_kl_coef": 0.1, "objective.kl_target": 0.5, "objective.kl_gain": 1.0}
        setting = POLICY | {"steps": 120, "evaluation.every": 120}
        runs = product(named(arms), [setting], seeds("poor"))
        return Sweep("How far does a poor reward model carry?", runs, "no KL", "configs/ppo_rlhf.py", minutes=1)
    raise ValueError(f"unknown variant {variant!r}; it has models, methods and overoptimisation")
