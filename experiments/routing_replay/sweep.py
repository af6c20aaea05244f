"""Does the ratio swing because experts change, and what helps? Routing replay, GSPO, SAPO and DAPO, in pairs.

    python -m jaxrl_llm.sweep --sweep experiments/routing_replay/sweep.py:quick --workdir runs/routing_replay/quick
    python -m jaxrl_llm.report runs/routing_replay/quick

VARIANTS has the variants and what each decides, in one line; protocol.md has their runs. `quick` takes at most ten
minutes on two cores, `seeds` about twenty; the others resume and take hours. `tune` is the budget of `tuned.json`,
which `python experiments/routing_replay/tuned.py DIR` writes and `full` reads. full@8,32 is the part of `full` at N = 8
and 32, branch@4e-4 that of `branch` at one rate (PARTS has the variants that have some): the whole goes on in its DIR.
strong@2 has 16 trajectories of the strongest noise.

The results have arms GRPO+PR2 and a sweep `predict`: a predictor of the routing, which commit ae394b4 still has.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_llm.sweep import Branching, Sweep, chain, each, product, zipped

CONFIG = "configs/routing_replay.py"
COUNTDOWN = "experiments/ablations/countdown.py"
ARMS: dict[str, dict[str, Any]] = {
    "GRPO": {"objective.name": "grpo"},
    "GRPO+R2": {"objective.name": "grpo", "replay.mode": "R2"},
    "GRPO+R3": {"objective.name": "grpo", "replay.mode": "R3"},
    "GSPO": {"objective.name": "gspo", "objective.clip_low": 8e-3, "objective.clip_high": 1e-2},
    "GSPO+R2": {
        "objective.name": "gspo",
        "objective.clip_low": 8e-3,
        "objective.clip_high": 1e-2,
        "replay.mode": "R2",
    },
    "SAPO": {"objective.name": "sapo"},
    "DAPO": {"objective.name": "dapo", "dynamic_sampling.max_draws": 3},
}
UPDATES = (1, 2, 4, 8, 16, 32)
# Learning rates from that N on: the more updates, the lower.
RATES = {
    1: (2e-4, 4e-4, 8e-4, 1.6e-3),
    4: (5e-5, 1e-4, 2e-4, 4e-4),
    16: (2.5e-5, 5e-5, 1e-4, 2e-4),
}


def arms(*names: str) -> list[dict[str, Any]]:
    return [{"arm": name, **ARMS[name]} for name in names or ARMS]


def seeds(first: int, count: int) -> list[dict[str, Any]]:
    """A seed changes the warm start too: another seed is another policy, prompts and keys."""
    numbers = range(first, first + count)
    return zipped(each("seed", numbers), each("warm_start.seed", numbers))


def updates(*numbers: int) -> list[dict[str, Any]]:
    return zipped(each("condition", [f"N = {n}" for n in numbers]), each("updates.minibatches", numbers))


def tuned(*numbers: int) -> list[dict[str, Any]]:
    """Every (arm, N) with the learning rate that `tune` found; 4e-4 where nothing was tuned."""
    path = Path(__file__).with_name("tuned.json")
    rates = json.loads(path.read_text()) if path.exists() else {}
    runs = product(arms(), updates(*numbers))
    return [run | {"optimizer.learning_rate": rates.get(run["condition"], {}).get(run["arm"], 4e-4)} for run in runs]


BRANCHED = {"steps": 30, "checkpoint.every": 5}  # a branch's trajectory


def rates(*values: float) -> list[dict[str, Any]]:
    return zipped(each("condition", [f"lr {rate:g}" for rate in values]), each("optimizer.learning_rate", values))


def clipped(*bounds: float) -> list[dict[str, Any]]:
    """GRPO with other clips, in the proportion of GSPO's two bounds; at 1e-8 a ratio in float32 may not move at all."""
    return [
        {
            "arm": f"GRPO clip {bound:g}",
            "objective.name": "grpo",
            "objective.clip_low": 0.8 * bound,
            "objective.clip_high": bound,
        }
        for bound in bounds
    ]


def compared(*parts: Any, minutes: float = 1, branching: Branching | None = None) -> Sweep:
    """The product of arms, settings and seeds against GRPO."""
    return Sweep("", product(*parts), baseline="GRPO", config=CONFIG, minutes=minutes, branching=branching)


def branch_smoke() -> Sweep:
    smoke = compared(arms("GRPO", "GRPO+R2"), seeds(0, 2), minutes=0.5, branching=Branching(first=0, every=1))
    return replace(smoke, config=f"{CONFIG}:smoke")


def branch(*own: float) -> Sweep:
    named = chain(arms("GRPO", "GRPO+R2", "GSPO", "SAPO"), [{"arm": "SAT", "objective.name": "sat"}])
    conditions = rates(*(own or (2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4)))
    parts = (conditions, [BRANCHED], seeds(0, 8))
    return compared(chain(named, clipped(0.02, 0.002)), *parts, minutes=3, branching=Branching(first=1, every=3))


def tight(*own: float) -> Sweep:
    parts = (rates(*(own or (2e-4, 4e-4))), [BRANCHED], seeds(8, 16))
    tight = chain(arms("GRPO", "GSPO"), clipped(2e-5, 1e-8))
    return compared(tight, *parts, minutes=3, branching=Branching(first=1, every=3))


# Trajectories that an interval of 0.01 on either side takes, by the spread in `branch` and `tight`, for SAPO at 4e-4
# also here: of all arms, and of SAPO, whose effect spreads most.
TRAJECTORIES = {2e-4: (28, 60), 4e-4: (80, 152)}


def precise(*own: float) -> Sweep:
    sat = {"arm": "SAT", "objective.name": "sat"}
    every = chain(arms("GRPO", "GRPO+R2", "GSPO", "SAPO"), [sat], clipped(1e-8))
    if not TRAJECTORIES.keys() >= set(own):
        raise ValueError(f"the rates of precise are {', '.join(f'{rate:g}' for rate in TRAJECTORIES)}")
    parts = [
        product(named, rates(rate), [BRANCHED], seeds(first, last - first))
        for rate, (all_arms, sapo) in TRAJECTORIES.items()
        if rate in own or not own
        for named, first, last in (
            (every, 24, 24 + all_arms),
            (arms("GRPO", "SAPO"), 24 + all_arms, 24 + sapo),
        )
    ]
    return compared(chain(*parts), minutes=1.5, branching=Branching(first=1, every=3))


def confirm() -> Sweep:
    parts = (rates(2e-4), [BRANCHED], seeds(200, 60))
    return compared(arms("GRPO", "GRPO+R2"), *parts, minutes=1, branching=Branching(first=1, every=3))


# Standard deviations of the sampler's router noise, by the share of experts that differ at the start, as noise.py
# measures it.
NOISE = {"no noise": 0.0, "1 % flips": 0.014, "3 % flips": 0.054, "10 % flips": 0.21}
STRONG_NOISE = {f"noise {scale:g}": scale for scale in (0.5, 1.0, 2.0)}
# The rates of `full` at N = 1 and of its neighbour at N = 4.
CONTROL_RATES = {1: 2e-4, 4: 1e-4}


def control(*numbers: int) -> Sweep:
    return noisy(numbers or tuple(CONTROL_RATES), NOISE, 5)


def strong(*scales: float) -> Sweep:
    noises = {name: scale for name, scale in STRONG_NOISE.items() if not scales or scale in scales}
    if len(noises) < len(scales):
        raise ValueError(f"the noises of strong are {', '.join(f'{x:g}' for x in STRONG_NOISE.values())}")
    return noisy([4], noises, 16 if scales else 8)


def noisy(numbers: Iterable[int], noises: Mapping[str, float], count: int) -> Sweep:
    corrected = [{"arm": "GRPO+TIS", "objective.name": "grpo", "objective.correction": "tis"}]
    conditions = [
        {
            "condition": f"N = {n}, {name}",
            "updates.minibatches": n,
            "optimizer.learning_rate": CONTROL_RATES[n],
            "rollout.router_noise": scale,
        }
        for n in numbers
        for name, scale in noises.items()
    ]
    every = product(chain(arms("GRPO", "GRPO+R2", "GRPO+R3"), corrected), conditions)
    parts = ([BRANCHED | {"steps": 16}], seeds(0, count))
    branching = Branching(first=0, every=4, rollouts=4)
    return compared(every, *parts, minutes=2, branching=branching)


# A single expert's gate is its probability: normalised it would be 1, and the router would have no gradient.
SWITCH = {"model.num_experts": 64, "model.num_experts_per_tok": 1, "model.norm_topk_prob": False}


def dose() -> Sweep:
    """From experts that hardly move to a router that moves alone; what trains the router alone needs larger steps."""
    small = {"optimizer.learning_rate": 1e-4}
    alone = {"lora.rank": 8, "lora.targets": "router"}
    settings = chain(
        [{"condition": "as above", **small}],
        [{"condition": "router x 10", **small, "optimizer.router_factor": 10.0}],
        [{"condition": "router x 100", **small, "optimizer.router_factor": 100.0}],
        [{"condition": "router alone, 1e-3", **alone, "optimizer.learning_rate": 1e-3}],
        [{"condition": "router alone, 1e-2", **alone, "optimizer.learning_rate": 1e-2}],
        [{"condition": "8 layers", **small, "model.num_hidden_layers": 8}],
        [{"condition": "64 experts, top-2", **small, "model.num_experts": 64, "model.num_experts_per_tok": 2}],
        [{"condition": "64 experts, top-1", **small, **SWITCH}],
        [{"condition": "16 layers", **small, "model.num_hidden_layers": 16}],
        [{"condition": "router alone, 3e-2", **alone, "optimizer.learning_rate": 3e-2}],
    )
    parts = (settings, [BRANCHED | {"log.diagnostics_every": 1, "steps": 20}], seeds(0, 5))
    return compared(arms("GRPO", "GRPO+R2"), *parts, minutes=2, branching=Branching(first=1, every=2))


# Half decades, from a rate at which nothing moves to one that no arm bears.
CURVE_RATES = (6e-6, 2e-5, 6e-5, 2e-4, 6e-4, 2e-3)


def curves(*numbers: int) -> Sweep:
    conditions = [
        {"condition": f"N = {n}, lr {rate:g}", "updates.minibatches": n, "optimizer.learning_rate": rate}
        for n in numbers or (8, 32)
        for rate in CURVE_RATES
    ]
    runs = product(arms("GRPO", "GRPO+R2", "GSPO"), conditions, seeds(0, 5))
    return Sweep("", runs, baseline="GRPO", config=CONFIG, minutes=0.5)


def horizon() -> Sweep:
    """DAPO draws up to three rollouts a step and drops groups; the last arm trains on as many groups as it may draw."""
    tripled = [{"arm": "GRPO, 96 prompts", "objective.name": "grpo", "rollout.prompts": 96}]
    compared = chain(arms("GRPO", "GRPO+R2", "GSPO", "DAPO"), tripled)
    setting = {"steps": 300, "evaluation.every": 20, "checkpoint.every": 100, "log.diagnostics_every": 60}
    return Sweep("", product(compared, [setting], seeds(0, 10)), baseline="GRPO", config=COUNTDOWN, minutes=5)


def quick() -> Sweep:
    return compared(arms("GRPO", "GRPO+R2", "GSPO", "SAPO"), seeds(0, 3))


def ten_seeds() -> Sweep:
    return compared(arms("GRPO", "GRPO+R2", "GRPO+R3", "GSPO", "SAPO"), seeds(0, 10))


def full(*numbers: int) -> Sweep:
    return compared(tuned(*(numbers or UPDATES)), seeds(0, 5))


def tune(*numbers: int) -> Sweep:
    rated = [
        {**n, "condition": f"{n['condition']}, lr {rate:g}", "optimizer.learning_rate": rate}
        for n in updates(*(numbers or UPDATES))
        for rate in RATES[max(first for first in RATES if first <= n["updates.minibatches"])]
    ]
    return compared(arms(), rated, seeds(100, 1))


def mismatch() -> Sweep:
    corrected = {"arm": "GRPO+TIS", **ARMS["GRPO"], "objective.correction": "tis"}
    every = chain(arms("GRPO", "GRPO+R2", "GRPO+R3", "GSPO"), [corrected])
    return compared(every, [{"rollout.dtype": "bfloat16"}], seeds(0, 5))


# What makes each variant, and what it decides.
VARIANTS: dict[str, tuple[Callable[..., Sweep], str]] = {
    "quick": (quick, "How do four arms end at N = 32? Three seeds, so no verdict"),
    "seeds": (ten_seeds, "Does a remedy end above GRPO at N = 32 and one rate?"),
    "full": (full, "Does a remedy end above GRPO at any N, each at its own tuned rate?"),
    "tune": (tune, "At which learning rate does each arm of `full` end highest?"),
    "mismatch": (mismatch, "Does R3 or TIS help where a bfloat16 rollout meets float32 training?"),
    "branch": (
        branch,
        "What does one rollout gain under one ratio a sequence, a tighter clip or replay, at five rates?",
    ),
    "tight": (tight, "Is GSPO above clips of tokens that cut as much as it does?"),
    "precise": (precise, "Which arm is above GRPO after one rollout, to 0.01?"),
    "confirm": (confirm, "Does R2 cost accuracy at 2e-4, as `precise` estimated?"),
    "control": (control, "Does R3 or TIS repair what a noisy router of the sampler harms?"),
    "strong": (strong, "Is there a noise of the router that harms, and does R3 repair it?"),
    "dose": (dose, "Does replay begin to pay as routing moves the ratio more?"),
    "curves": (curves, "Which learning rate does each remedy bear?"),
    "horizon": (horizon, "Does a remedy pay over a long run, with room below the ceiling?"),
    "branch_smoke": (branch_smoke, "Do branches run? Two arms of a tiny model"),
}
# What a part of a variant names, as in full@8,32.
PARTS: dict[str, Callable[[str], float]] = {
    **dict.fromkeys(("full", "tune", "control", "curves"), int),  # N
    **dict.fromkeys(("branch", "tight", "precise"), float),  # the learning rate
    "strong": float,  # the noise
}


def get_sweep(variant: str = "quick") -> Sweep:
    name, _, part = variant.partition("@")
    if name not in VARIANTS:
        raise ValueError(f"unknown variant {name!r}; it has {', '.join(VARIANTS)}")
    if part and name not in PARTS:
        by_rate = "branch, tight and precise"
        raise ValueError(
            f"{variant}: full, tune, control and curves have parts by N, {by_rate} by rate, strong by noise"
        )
    make, decides = VARIANTS[name]
    return replace(make(*(PARTS[name](one) for one in part.split(",") if part)), question=decides)
