"""A published model learns to add: SmolLM2-135M-Instruct under GRPO, GSPO and DAPO, three seeds.

    python -m jaxrl_llm.sweep --sweep experiments/real_model/sweep.py --workdir runs/real_model
    python -m jaxrl_llm.report runs/real_model

full    nine runs, about five minutes each on one core
quick   one seed and five steps of each arm
"""

from typing import Any

from jaxrl_llm.sweep import Sweep, each, product

QUESTION = "Does a published model get better at two-digit sums under GRPO, GSPO and DAPO?"
CONFIG = "configs/smollm2_sums_grpo.py"
ARMS: list[dict[str, Any]] = [
    {"arm": "GRPO", "objective.name": "grpo"},
    {"arm": "GSPO", "objective.name": "gspo", "objective.clip_low": 8e-3, "objective.clip_high": 1e-2},
    {"arm": "DAPO", "objective.name": "dapo", "dynamic_sampling.max_draws": 2},
]


def get_sweep(variant: str = "full") -> Sweep:
    if variant == "full":
        return Sweep(
            QUESTION,
            product(ARMS, each("seed", range(3))),
            baseline="GRPO",
            config=CONFIG,
            minutes=5,
        )
    if variant == "quick":
        short = {"steps": 5, "evaluation.every": 5, "evaluation.prompts": 32}
        runs = product(ARMS, [short], each("seed", range(1)))
        return Sweep(QUESTION, runs, baseline="GRPO", config=CONFIG, minutes=1.5)
    raise ValueError(f"unknown variant {variant!r}; it has full and quick")
