"""The numbers in the texts of this study that no other table holds, by sweep: what, and the number."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from experiments.routing_replay.table_parts import (
    SAMPLED,
    Table,
    collapsed,
    gain,
    interval,
    mean,
    same_states,
    start_of,
    told_share,
)
from jaxrl_llm.report.comparisons import compare
from jaxrl_llm.report.read import Run, Study
from jaxrl_llm.report.statistics import PairedDifference


def full(study: Study) -> Table:
    remedies = [arm for arm in study.arms if arm != "DAPO"]
    several = [condition for condition in study.conditions if condition != "N = 1"]
    found = [d for n in several for arm, d in _found(study, n).items() if arm in remedies]
    dapo = [run for run in study.runs if run.arm == "DAPO"]
    share, middle = told_share(study.select("DAPO", "N = 8"))
    numbers = {
        "sampled accuracy at the start": f"{np.mean([start_of(run) for run in study.runs]):.3f}",
        "greedy accuracy of GRPO at the end": _range(
            (mean(study.select("GRPO", n), "eval/greedy", 1) for n in several), 2
        ),
        "detectable, the largest but DAPO's": f"{max(d.detectable for d in found):.3f}",
        "farthest end of an interval but DAPO's": f"{max(max(-d.low, d.high) for d in found):.3f}",
        "groups that DAPO draws": f"{mean(dapo, 'rollout/groups_generated'):.0f}",
        "runs that collapsed": collapsed(study.runs),
        "DAPO at N = 8, share of routing and median": f"{share}, {middle}",
        "DAPO at N = 8, Var(log r)": f"{mean(study.select('DAPO', 'N = 8'), 'routing/log_ratio_var'):.3f}",
    }
    for n in several:
        numbers[f"experts changed, {n}, all but DAPO"] = (
            _range((_changed(study.select(arm, n)) for arm in remedies), 1) + " %"
        )
        numbers[f"experts changed, {n}, GRPO"] = f"{_changed(study.select('GRPO', n)):.2f} %"
    return _rows("full", numbers)


def seeds(study: Study) -> Table:
    found = _found(study)
    gspo, sapo = study.select("GSPO", ""), study.select("SAPO", "")
    return _rows(
        "seeds",
        {
            "sampled accuracy at the start": f"{np.mean([start_of(run) for run in study.runs]):.3f}",
            "detectable, GRPO+R2 and GSPO": f"{found['GRPO+R2'].detectable:.2f}, {found['GSPO'].detectable:.2f}",
            "gradient weight of GSPO, A > 0 and A < 0": _weights(gspo),
            "gradient weight of SAPO, A > 0 and A < 0": _weights(sapo),
            "rollout at which the last run of SAPO had collapsed": f"{max(run.collapse()[0] for run in sapo):.0f}",
        },
    )


def mismatch(study: Study) -> Table:
    found = _found(study)
    drift = mean(study.select("GRPO", ""), "kl/old")
    return _rows(
        "mismatch",
        {"detectable, GRPO+R3": f"{found['GRPO+R3'].detectable:.2f}", "KL to the old policy, GRPO": f"{drift:.2f}"},
    )


def predict(study: Study) -> Table:
    """In its first rollout a predictor does not choose yet: every number of its 32 updates is R2's."""
    first = [
        {
            (run.condition, run.seed, run.branch): next(row for row in run.rows if "reward/mean" in row) | {"arm": ""}
            for run in study.runs
            if run.arm == arm
        }
        for arm in ("GRPO+R2", "GRPO+PR2")
    ]
    equal = sum(first[0][state] == first[1][state] for state in first[0])
    return _rows("predict", {"first rollouts of PR2 that are R2's in every number": f"{equal} of {len(first[0])}"})


def control(study: Study) -> Table:
    noisy, quiet = (study.select("GRPO", f"N = 4, {noise}") for noise in ("10 % flips", "no noise"))
    more = same_states(noisy, quiet, gain)
    return _rows(
        "control",
        {"gain of GRPO at 10 % minus that without, N = 4; detectable": f"{interval(more)}; {more.detectable:.3f}"},
    )


def strong(study: Study) -> Table:
    flips = {noise: mean(study.select("GRPO", noise), "routing/flips_sampler_old") for noise in study.conditions}
    return _rows("strong", {f"experts exchanged, {noise}": f"{100 * share:.0f} %" for noise, share in flips.items()})


def curves(study: Study) -> Table:
    starts = {n: [start_of(run) for run in study.runs if run.condition.startswith(f"N = {n},")] for n in (8, 32)}
    return _rows(
        "curves", {f"sampled accuracy at the start, N = {n}": f"{np.mean(each):.3f}" for n, each in starts.items()}
    )


def horizon(study: Study) -> Table:
    return _rows("horizon", {"runs that collapsed": collapsed(study.runs)})


def _found(study: Study, condition: str = "") -> dict[str, PairedDifference]:
    """Every arm's difference in held-out sampled accuracy at the end."""
    return {c.arm: c.difference for c in compare(study, condition) if c.outcome == SAMPLED}


def _rows(sweep: str, numbers: Mapping[str, str]) -> Table:
    return [[f"`{sweep}`", what, number] for what, number in numbers.items()]


def _range(values: Iterable[float], digits: int) -> str:
    low, *_, high = sorted(values)
    return f"{low:.{digits}f} to {high:.{digits}f}"


def _changed(runs: Sequence[Run]) -> float:
    """Percent of the experts, mean over the updates of a rollout."""
    return 100 * mean(runs, "routing/flips_old_current")


def _weights(runs: Sequence[Run]) -> str:
    return ", ".join(f"{100 * mean(runs, f'gradient_weight/{side}'):.0f} %" for side in ("positive", "negative"))
