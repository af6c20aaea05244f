"""One part of an objective at a time, in pairs of five seeds, at most thirty runs of about a minute each.

    python -m jaxrl_llm.sweep --sweep experiments/ablations/sweep.py:kl --workdir runs/ablations/kl
    python -m jaxrl_llm.report runs/ablations/kl

clip_range    GSPO: three widths of the clip at answers of 6 and of 21 tokens
temperatures  SAPO: tau_pos and tau_neg at N = 32, against GRPO
aggregation   how tokens and answers are averaged: who grows long?
dapo_parts    from GRPO to DAPO, one part more in every arm, in the order of the paper's table 1
kl            no KL, and k2, k3 and k3_unbiased at one coefficient
"""

import itertools
from typing import Any

from jaxrl_llm.sweep import Sweep, each, product, zipped

COUNTDOWN = "experiments/ablations/countdown.py"
Arms = dict[str, dict[str, Any]]

CLIP_RANGE: Arms = {
    f"{low:g} / {high:g}": {"objective.clip_low": low, "objective.clip_high": high}
    for low, high in ((8e-3, 1e-2), (2e-3, 2.5e-3), (3.2e-2, 4e-2))
}
LENGTHS: Arms = {f"{digits + 1} tokens": {"task.options.digits": digits} for digits in (5, 20)}
TEMPERATURES: Arms = {
    f"tau {pos:g} / {neg:g}": {"objective.name": "sapo", "objective.tau_pos": pos, "objective.tau_neg": neg}
    for pos, neg in ((1.0, 1.05), (4.0, 4.2), (16.0, 16.8), (4.0, 16.0), (16.0, 4.0))
} | {"GRPO": {"objective.name": "grpo"}}
AGGREGATION: Arms = {
    "sequence mean": {"objective.aggregation": "sequence_mean_token_mean"},
    "token mean": {"objective.aggregation": "token_mean"},
    "constant": {"objective.aggregation": "constant"},
    "constant, no std": {"objective.aggregation": "constant", "objective.std": "none"},
}
DAPO_PARTS: Arms = {
    "GRPO": {},
    "+ overlong filtering": {"rewards.overlong_filter": True},
    "+ clip-higher": {"objective.clip_high": 0.28},
    "+ soft overlong punishment": {"rewards.overlong_cache": 1},
    "+ token-level loss": {"objective.aggregation": "token_mean"},
    "+ dynamic sampling": {"dynamic_sampling.max_draws": 3},
}
KL: Arms = {"no KL": {}} | {
    name: {"objective.kl_coef": 0.1, "objective.kl_estimator": name} for name in ("k2", "k3", "k3_unbiased")
}


def named(label: str, arms: Arms) -> list[dict[str, Any]]:
    return [{label: name, **fields} for name, fields in arms.items()]


def added_up(arms: Arms) -> Arms:
    """Every arm with the fields of all arms before it."""
    return dict(zip(arms, itertools.accumulate(arms.values(), lambda before, part: before | part), strict=True))


def seeds() -> list[dict[str, Any]]:
    """A seed changes the warm start too: another seed is another policy, prompts and keys."""
    return zipped(each("seed", range(5)), each("warm_start.seed", range(5)))


def get_sweep(variant: str = "kl") -> Sweep:
    if variant == "clip_range":
        # Warm starts of equal pass rate, however long the answers are.
        setting = {
            "updates.minibatches": 8,
            "optimizer.learning_rate": 2e-4,
            "steps": 40,
            "evaluation.every": 40,
            "log.diagnostics_every": 0,
            "warm_start.steps": 1200,
            "warm_start.target_pass_rate": 0.6,
        }
        runs = product(named("arm", CLIP_RANGE), named("condition", LENGTHS), [setting], seeds())
        question = "Which clip range does GSPO need, and does it go with the length of the answers?"
        return Sweep(question, runs, baseline="0.008 / 0.01", config="configs/gspo.py", minutes=1.5)
    if variant == "temperatures":
        question = "Does a sharper gate keep SAPO from collapsing at many updates a rollout?"
        runs = product(named("arm", TEMPERATURES), seeds())
        return Sweep(question, runs, baseline="tau 1 / 1.05", config="configs/routing_replay.py", minutes=1)
    if variant == "aggregation":
        # Room to grow, and no clipping of the gradient, whose scale differs between the arms; Adam divides it out.
        setting = {"rollout.max_new_tokens": 16, "optimizer.clip_norm": 0.0}
        runs = product(named("arm", AGGREGATION), [setting], seeds())
        question = "Does averaging over each answer's own length make wrong answers longer?"
        return Sweep(question, runs, baseline="sequence mean", config=COUNTDOWN, minutes=1)
    if variant == "dapo_parts":
        # Of the right answers of the warm start one in nine is longer than 9 tokens: the policy must stop in time.
        runs = product(named("arm", added_up(DAPO_PARTS)), [{"rollout.max_new_tokens": 9}], seeds())
        return Sweep("What does each part of DAPO add?", runs, baseline="GRPO", config=COUNTDOWN, minutes=1)
    if variant == "kl":
        question = "Does the estimator of the KL term matter at one coefficient?"
        return Sweep(question, product(named("arm", KL), seeds()), baseline="no KL", config=COUNTDOWN, minutes=1)
    raise ValueError(f"unknown variant {variant!r}; it has clip_range, temperatures, aggregation, dapo_parts and kl")
