"""The weakness of each method, seen and then gone: the measured half of docs/lineage.md.

    python -m jaxrl_llm.sweep --sweep experiments/lineage/sweep.py --workdir runs/lineage
    python -m experiments.lineage.figures runs/lineage

all      the three groups below, three seeds each
critic   PPO and GRPO at answers of 6 and of 21 tokens: what the critic explains
clip     countdown: a symmetric clip, clip-higher, and dynamic sampling on top
mixture  32 updates a rollout: a dense model, a mixture of experts, replay, one ratio a sequence, a soft gate
"""

from typing import Any

from jaxrl_llm.sweep import Sweep, chain, each, product, zipped

Run = dict[str, Any]

COUNTDOWN = "experiments/ablations/countdown.py"
MIXTURE = "configs/routing_replay.py"

CRITIC = product(
    [
        {"arm": "PPO", "objective.name": "ppo", "critic.kind": "separate", "objective.lam": 1.0},
        {"arm": "GRPO", "objective.name": "grpo"},
    ],
    [
        {"condition": "6 tokens", "task.options.digits": 5, "warm_start.steps": 100},
        {"condition": "21 tokens", "task.options.digits": 20, "warm_start.steps": 1200},
    ],
    # Warm starts of equal pass rate, however long the answers are.
    [
        {
            "config": "configs/base.py",
            "steps": 30,
            "evaluation.every": 30,
            "updates.minibatches": 8,
            "warm_start.target_pass_rate": 0.6,
        }
    ],
)
CLIP = product(
    [
        {"arm": "GRPO", "objective.clip_low": 0.1, "objective.clip_high": 0.1},
        {"arm": "+ clip-higher", "objective.clip_low": 0.1, "objective.clip_high": 0.4},
        {
            "arm": "+ dynamic sampling",
            "objective.clip_low": 0.1,
            "objective.clip_high": 0.4,
            "dynamic_sampling.max_draws": 3,
        },
    ],
    [{"condition": "countdown", "config": COUNTDOWN, "updates.minibatches": 16, "log.samples": 256}],
)
GSPO: Run = {"objective.name": "gspo", "objective.clip_low": 8e-3, "objective.clip_high": 1e-2}
MIXED = product(
    [
        {"arm": "GRPO", "objective.name": "grpo"},
        {"arm": "GRPO, dense model", "model.num_experts": 0, "model.intermediate_size": 64},
        {"arm": "GRPO+R2", "replay.mode": "R2"},
        {"arm": "GSPO", **GSPO},
        {"arm": "SAPO", "objective.name": "sapo"},
    ],
    [{"condition": "mixture", "config": MIXTURE, "optimizer.learning_rate": 1e-4}],
)


def get_sweep(variant: str = "all") -> Sweep:
    groups = {"critic": CRITIC, "clip": CLIP, "mixture": MIXED}
    if variant not in (*groups, "all"):
        raise ValueError(f"unknown variant {variant!r}; it has all, {', '.join(groups)}")
    chosen = chain(*(groups.values() if variant == "all" else [groups[variant]]))
    # A seed changes the warm start too: another seed is another policy, prompts and keys.
    seeds = zipped(each("seed", range(3)), each("warm_start.seed", range(3)))
    question = "What is the weakness that each method removes from the one before it?"
    return Sweep(question, product(chosen, seeds), baseline="GRPO", minutes=1)
