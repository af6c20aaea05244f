"""The tables of whole runs: `full`, `seeds` and `mismatch`."""

import dataclasses
from collections.abc import Callable

import numpy as np

from experiments.routing_replay.table_parts import (
    SAMPLED,
    Table,
    collapsed,
    interval,
    mean,
    share_of_variance,
    told_share,
)
from jaxrl_llm.report.comparisons import compare
from jaxrl_llm.report.read import CLIPPED, Run, Study
from jaxrl_llm.report.statistics import paired_difference


def full(study: Study) -> Table:
    """Arm; at each N held-out sampled accuracy at the end and the difference to GRPO."""
    rows = [[arm] for arm in study.arms]
    for condition in study.conditions:
        found = _differences(study, condition)
        for row in rows:
            row += [f"{mean(study.select(row[0], condition), 'eval/pass_at_1', last=1):.3f}", found.get(row[0], "")]
    return rows


def across(study: Study) -> Table:
    """Arm; the difference of held-out sampled accuracy at the end, N = 8, 16 and 32 minus N = 1, paired by seed."""
    ends = {(run.arm, run.condition, run.seed): SAMPLED.measure(run) for run in study.runs}
    numbers = list(dict.fromkeys(run.seed for run in study.runs))
    rows = []
    for arm in study.arms:
        one, *more = ([ends[arm, condition, seed] for seed in numbers] for condition in study.conditions)
        rows.append([arm, *(interval(paired_difference(other, one)) for other in more)])
    return rows


def seeds(study: Study) -> Table:
    """Arm, greedy from start to end, sampled, reward, clipped, experts changed, collapsed."""
    return [
        [
            arm,
            " -> ".join(f"{np.mean([run.value('eval/greedy', at=at) for run in runs]):.3f}" for at in (0, -1)),
            *(f"{mean(runs, key, last):.3f}" for key, last in (("eval/pass_at_1", 1), ("reward/mean", 5))),
            f"{100 * mean(runs, CLIPPED):.1f} %",
            f"{100 * mean(runs, 'routing/flips_old_current'):.1f} %",
            collapsed(runs),
        ]
        for arm, runs in _arms(study)
    ]


def mismatch(study: Study) -> Table:
    """Arm, greedy and sampled at the end, difference in it to GRPO and to R2, k3 and experts, sampler to old."""
    found, replayed = (_differences(dataclasses.replace(study, baseline=arm), "") for arm in ("GRPO", "GRPO+R2"))
    return [
        [
            arm,
            *(f"{mean(runs, f'eval/{name}', last=1):.3f}" for name in ("greedy", "pass_at_1")),
            found.get(arm, ""),
            replayed.get(arm, ""),
            f"{mean(runs, 'kl/sampler'):.1e}",
            f"{100 * mean(runs, 'routing/flips_sampler_old'):.2f} %",
        ]
        for arm, runs in _arms(study)
    ]


def shares(study: Study, name: str, setting: Callable[[str], str]) -> Table:
    """Sweep, setting; of GRPO and GRPO+R2 routing's share of Var(log r), its interval over seeds, and the median."""
    rows = []
    for condition in study.conditions:
        both = [study.select(arm, condition) for arm in ("GRPO", "GRPO+R2")]
        if np.isfinite(share_of_variance(both[0])[0]):  # at N = 1 the ratio is 1
            rows.append([f"`{name}`", setting(condition), *(cell for runs in both for cell in told_share(runs))])
    return rows


def _arms(study: Study) -> list[tuple[str, list[Run]]]:
    return [(arm, study.select(arm, "")) for arm in study.arms]


def _differences(study: Study, condition: str) -> dict[str, str]:
    """Every arm's difference in held-out sampled accuracy; "0" where the pairs are equal to the bit."""
    compared = [c for c in compare(study, condition) if c.outcome == SAMPLED]
    return {c.arm: "0" if c.difference.identical else interval(c.difference) for c in compared}
