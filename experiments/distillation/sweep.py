"""A small student and its teacher: distillation against GRPO at equal answers, in pairs of five seeds.

    python -m jaxrl_llm.main --config sft --workdir runs/distillation/teacher --config.steps=600
    python -m jaxrl_llm.sweep --sweep experiments/distillation/sweep.py:compare --workdir runs/distillation/compare
    python -m experiments.distillation.tables --read runs/distillation/compare --teacher 0.903

pilot      every method at two learning rates and one seed; both are too high
compare    the methods at 3e-4 and five seeds
sparse     three of them from a student that is right in 1 of 100 answers
longer     GRPO and the exact form, from a wider student that is seldom right, for 240 rollouts
further    the same with five other seeds, for 480 rollouts
smoke      three rollouts of each
"""

from typing import Any

from jaxrl_llm.sweep import Sweep, each, product, zipped

TEACHER = "runs/distillation/teacher"
METHODS: dict[str, dict[str, Any]] = {
    "GRPO": {"objective.name": "grpo", "objective.advantage": "group", "teacher.path": ""},
    "sampled": {"teacher.path": TEACHER},
    "exact": {"teacher.path": TEACHER, "objective.advantage": "none", "objective.teacher_coef": 1.0},
    "one penalty": {"teacher.path": TEACHER, "objective.teacher_below": 0.1},
}
RATES = (1e-3, 3e-3)
RATE = 3e-4  # of `compare`: protocol.md says why
SETTING = {
    "steps": 40,
    "evaluation.every": 10,
    "evaluation.prompts": 256,
    "checkpoint.every": 10_000,
    "log.diagnostics_every": 0,
}


def seeds(*values: int) -> list[dict[str, Any]]:
    """A seed changes the warm start too: another seed is another student, prompts and keys."""
    return zipped(each("seed", values), each("warm_start.seed", values))


def arms(*rates: float) -> list[dict[str, Any]]:
    """Every method at each rate, or at the rate of `compare`."""
    if not rates:
        return [{"arm": name, **own, "optimizer.learning_rate": RATE} for name, own in METHODS.items()]
    return [
        {"arm": name, "condition": f"lr {rate:g}", **own, "optimizer.learning_rate": rate}
        for name, own in METHODS.items()
        for rate in rates
    ]


def get_sweep(variant: str = "compare") -> Sweep:
    config, question = "configs/distill.py", "Does a student reach its teacher sooner by distillation than by GRPO?"
    if variant == "pilot":
        return Sweep("Which rate?", product(arms(*RATES), [SETTING], seeds(100)), "GRPO", config, minutes=1)
    if variant == "compare":
        return Sweep(question, product(arms(), [SETTING], seeds(*range(5))), "GRPO", config, minutes=1)
    if variant == "sparse":
        own = [arm for arm in arms() if arm["arm"] != "one penalty"]
        rows = product(own, [SETTING | {"warm_start.steps": 40}], seeds(*range(5)))
        return Sweep("And where rewards are sparse?", rows, "GRPO", config, minutes=1)
    if variant in ("longer", "further"):
        own = [arm for arm in arms() if arm["arm"] in ("GRPO", "exact")]
        wider = {"model.num_hidden_layers": 3, "model.hidden_size": 64, "model.intermediate_size": 128}
        steps, first = (240, 0) if variant == "longer" else (480, 5)
        long = {"warm_start.steps": 40, "steps": steps, "evaluation.every": 60}
        return Sweep(
            "Does it reach its teacher?",
            product(own, [SETTING | wider | long], seeds(*range(first, first + 5))),
            "GRPO",
            config,
        )
    if variant == "smoke":
        short = SETTING | {"steps": 3, "evaluation.prompts": 64, "warm_start.steps": 50}
        return Sweep("Does it run?", product(arms(), [short], seeds(0)), "GRPO", f"{config}:smoke", minutes=0.5)
    raise ValueError(f"unknown variant {variant!r}; it has pilot, compare, sparse, longer, further and smoke")
