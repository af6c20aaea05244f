"""The tables and the figure of a sweep of branches for this page, and its data in small.

    python -m experiments.routing_replay.branches runs/routing_replay/branch [--second 4]     # prints Markdown
    python -m experiments.routing_replay.branches runs/routing_replay/tight --second 16 --baseline GSPO
    python -m experiments.routing_replay.branches runs/routing_replay/branch --figure OUT.png
    python -m experiments.routing_replay.branches runs/routing_replay/branch --pack OUT.tar.xz

The packed sweep is what the report reads, with the evaluations, the clipped shares and the routing of every branch.
"""

import argparse
import dataclasses

import numpy as np
from matplotlib.figure import Figure

from experiments.routing_replay.table_parts import (
    SAMPLED,
    Table,
    command,
    interval,
    mean,
    start_of,
    start_to_end,
    told_share,
)
from jaxrl_llm.report.read import CLIPPED, Study
from jaxrl_llm.report.statistics import MINIMUM_SEEDS, PairedDifference, paired_difference
from jaxrl_llm.report.style import INK, colour, label_ends, panels


def pairs(study: Study, arm: str, condition: str) -> np.ndarray:
    """Trajectory (seed), state's accuracy, baseline's end and arm's end of each pair of branches: [4, n]."""
    theirs = {(run.seed, run.branch): run for run in study.select(study.baseline, condition) if run.ended}
    both = [run for run in study.select(arm, condition) if run.ended and (run.seed, run.branch) in theirs]
    ours = [(run, theirs[run.seed, run.branch]) for run in both]
    rows = [(int(one.seed), start_of(one), SAMPLED.measure(other), SAMPLED.measure(one)) for one, other in ours]
    return np.array(rows, np.float64).reshape(-1, 4).T


def difference(study: Study, arm: str, condition: str, first: int = 0, last: float = np.inf) -> PairedDifference:
    """The difference to the baseline over the trajectories of the seeds from `first` to below `last`."""
    found = pairs(study, arm, condition)
    seeds, _, baseline, ended = found[:, (found[0] >= first) & (found[0] < last)]
    return paired_difference(ended, baseline, seeds.astype(int).tolist())


def by_seed(study: Study, arm: str, condition: str) -> dict[int, float]:
    """The mean difference to the baseline of each trajectory, by its seed."""
    seeds, _, baseline, ended = pairs(study, arm, condition)
    return {int(seed): float(np.mean((ended - baseline)[seeds == seed])) for seed in dict.fromkeys(seeds)}


def by_trajectory(study: Study, arm: str, condition: str, first: float = 0, last: float = np.inf) -> list[float]:
    """Return those of the trajectories whose seed is from `first` to below `last`."""
    return [value for seed, value in by_seed(study, arm, condition).items() if first <= seed < last]


def table(study: Study, second: int | None = None) -> Table:
    """Condition, arm, states, tokens clipped, difference with interval, detectable; each of two batches.

    second: the first seed of the second batch; None: there is one batch.

    Under the number of trajectories that a verdict takes, the mean of each stands in the place of an interval.
    """
    parts = [] if second is None else [(0, second), (second, np.inf)]
    rows = []
    for condition in study.conditions:
        for arm in study.arms:
            runs = study.select(arm, condition)
            if not runs:
                continue
            clipped = mean(runs, CLIPPED)
            cells = [condition, arm, str(len(runs)), f"{clipped * 100:.1f} %"]
            if arm == study.baseline:
                rows.append([*cells, f"({start_to_end(runs)})", "", *("" for _ in parts)])
                continue
            whole = difference(study, arm, condition)
            if whole.n < MINIMUM_SEEDS:
                each = ", ".join(SAMPLED.signed(one) for one in by_trajectory(study, arm, condition))
                rows.append([*cells, f"{SAMPLED.signed(whole.mean)} ({each})", "", *("" for _ in parts)])
                continue
            batches = [difference(study, arm, condition, *part) for part in parts]
            told = [interval(batch) if batch.n else "" for batch in batches]
            rows.append([*cells, interval(whole), f"{whole.detectable:.3f}", *told])
    return rows


def matrix(study: Study) -> Table:
    """A header, and of each condition the states, the baseline before and after, every arm's difference, detectable.

    Detectable is the largest of the row's arms.
    """
    rows = [["condition", "states", f"{study.baseline}, before -> after", *study.arms[1:], "detectable"]]
    for condition in study.conditions:
        runs = study.select(study.baseline, condition)
        found = {arm: difference(study, arm, condition) for arm in study.arms[1:] if study.select(arm, condition)}
        cells = [interval(found[arm]) if arm in found else "" for arm in study.arms[1:]]
        largest = max(d.detectable for d in found.values())
        rows.append([condition, str(len(runs)), start_to_end(runs), *cells, f"{largest:.3f}"])
    return rows


def routing(study: Study) -> Table:
    """Condition, arm, rollouts, experts changed, share of routing, median, Var(log r), tails of the routing part."""
    rows = []
    for condition in study.conditions:
        for arm in study.arms:
            runs = [run for run in study.select(arm, condition) if run.series("routing/log_ratio_var")[0].size]
            if not runs:
                continue
            tails = [f"{100 * mean(runs, f'routing/part_above_{name}'):.2f} %" for name in ("0.2", "ln2")]
            variance = f"{mean(runs, 'routing/log_ratio_var'):.2g}"
            changed = f"{mean(runs, 'routing/flips_fresh') * 100:.1f} %"
            rows.append([condition, arm, str(len(runs)), changed, *told_share(runs), variance, *tails])
    return rows


def figure(study: Study) -> Figure:
    """Difference to the baseline against the share of tokens clipped, one panel a condition; small: each trajectory."""
    drawn, axes = panels(
        [f"{one}: {SAMPLED.name}, difference to {study.baseline}" for one in study.conditions], columns=2, height=3.6
    )
    for ax, condition in zip(axes, study.conditions, strict=True):
        places = []
        for arm in study.arms[1:]:
            ink, x = colour(study.arms, arm), 100 * mean(study.select(arm, condition), CLIPPED)
            each = by_trajectory(study, arm, condition)
            ax.plot([x] * len(each), each, "o", color=ink, markersize=3.5, alpha=0.5)
            ax.plot(x, np.mean(each), "o", color=ink, markersize=8)
            places.append((float(np.mean(each)), f"{arm}  {np.mean(each):+.3f}", ink))
        ax.axhline(0, color=INK, linewidth=0.8)
        ax.set_xlabel("tokens clipped (%)", fontsize=8.5, color=INK)
        label_ends(ax, places)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--second", type=int, help="the first seed of the second batch")
    parser.add_argument("--baseline", help="the arm that the differences are to; default: the sweep's")

    def tables(study: Study, given: argparse.Namespace) -> list[Table]:
        study = dataclasses.replace(study, baseline=given.baseline or study.baseline)
        return [table(study, given.second), matrix(study), routing(study)]

    command(tables, figure, parser)


if __name__ == "__main__":
    main()
