"""A control that can see R3: samplers that choose other experts, at doses of equal k3, beside real ones.

    python -m jaxrl_llm.sweep --sweep experiments/routing_replay/choices.py:doses --workdir runs/choices
    python -m jaxrl_llm.report runs/choices

VARIANTS has the variants and what each decides, in one line. `choices@noise,k3 0.1` is what has these parts of a
condition; the whole goes on in its DIR, and so does `choices` in that of `doses`. The first question is at which dose
GRPO loses, under the trainer's router (eval/pass_at_1) or the sampler's (eval/sampler_pass_at_1): only there does a
null on R3 mean something.
"""

from collections.abc import Mapping
from typing import Any

from experiments.routing_replay.sweep import ARMS, CONFIG, seeds
from experiments.routing_replay.variants import Variants, variant_of
from jaxrl_llm.sweep import Sweep, chain, product

TIS = {"objective.correction": "tis"}
REMEDIES = [
    {"arm": "GRPO", **ARMS["GRPO"]},
    {"arm": "GRPO+R3", **ARMS["GRPO+R3"]},
    {"arm": "GRPO+R3 logits", **ARMS["GRPO+R3"], "replay.what": "logits"},
    {"arm": "GRPO+TIS", **ARMS["GRPO"], **TIS},
    {"arm": "GRPO+R3+TIS", **ARMS["GRPO+R3"], **TIS},
]
# Levels that move the choice of experts alone by so much k3 at the start, as noise.py measures them (one seed, 299):
# --gates exact --of k3 --doses 1.5e-3 1e-2 1e-1 --levels 0.1 0.3 1 3 [--field bias]
LEVELS: Mapping[str, Mapping[float, float]] = {
    "noise": {1.5e-3: 0.107, 1e-2: 0.393, 1e-1: 0.967},
    "bias": {1.5e-3: 0.117, 1e-2: 0.368, 1e-1: 1.01},
}
REAL = {name: {"condition": name, "rollout.dtype": name} for name in ("bfloat16", "float8_e4m3")}


def moved(field: str, k3: float) -> dict[str, Any]:
    fields = {f"rollout.router_{field}": LEVELS[field][k3], "rollout.router_gates": "exact"}
    return {"condition": f"{field}, k3 {k3:g}", **fields}


SAMPLERS = chain(
    [{"condition": "exact"}], [moved(field, k3) for field in LEVELS for k3 in LEVELS[field]], REAL.values()
)
SETTING = {"updates.minibatches": 4, "optimizer.learning_rate": 1e-4, "steps": 60, "evaluation.every": 20}
# What of the router still learns: nothing of it, and nothing else.
LEARNS = {
    "router frozen": {"optimizer.router_factor": 0.0},
    "router alone": {"lora.rank": 8, "lora.targets": "router", "optimizer.learning_rate": 1e-2},
}


def whole(runs: list[dict[str, Any]], first: int, count: int) -> Sweep:
    runs = product(runs, seeds(first, count))
    return Sweep("", [SETTING | run for run in runs], baseline="GRPO", config=CONFIG, minutes=2)


def doses() -> Sweep:
    return whole(product(REMEDIES[:1], SAMPLERS), 800, 10)


def choices() -> Sweep:
    return whole(product(REMEDIES, SAMPLERS), 800, 10)


def routers() -> Sweep:
    conditions = [
        {**sampler, "condition": f"{name}, {sampler['condition']}", **fields}
        for name, fields in LEARNS.items()
        for sampler in SAMPLERS
    ]
    return whole(product(REMEDIES[:2], conditions), 800, 10)


VARIANTS: Variants = {
    "doses": (doses, "At which dose does GRPO lose, under the trainer's or the sampler's router?"),
    "choices": (choices, "At such a dose, does R3 or TIS win back what GRPO loses?"),
    "routers": (routers, "Does R3 matter where the router is frozen, or learns alone?"),
}


def get_sweep(variant: str = "choices") -> Sweep:
    return variant_of(VARIANTS, variant)
