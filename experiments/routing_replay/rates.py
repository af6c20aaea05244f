"""The learning rates that each arm of `curves` bears: table and figure for this page.

    python -m experiments.routing_replay.rates runs/routing_replay/curves                  # prints Markdown
    python -m experiments.routing_replay.rates runs/routing_replay/curves --figure OUT.png --pack OUT.tar.xz

A rate is stable for a seed if held-out sampled accuracy ends no lower than it started, there and at every rate between
it and the one that ends highest. The highest stable rate is where the end crosses the start, on the line between the
last stable rate and the next one, over the logarithm of the rate; at an edge of the rates that were tried it is the
edge, and counted as such.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.routing_replay.table_parts import SAMPLED, Table, command, interval, start_of
from jaxrl_llm.report.read import Study
from jaxrl_llm.report.statistics import PairedDifference, paired_difference
from jaxrl_llm.report.style import INK, label_ends, line, panels

SMALL_LOSS = 0.05


def highest_stable(rates: Sequence[float], gains: Sequence[float]) -> tuple[float, bool]:
    """The highest stable rate and whether it is an edge of `rates`, which rise; `gains` are end minus start."""
    best = max(range(len(gains)), key=gains.__getitem__)
    if gains[best] < 0:
        return rates[0], True
    i = next((i for i in range(best, len(gains)) if gains[i] < 0), None)
    if i is None:
        return rates[-1], True
    share = gains[i - 1] / (gains[i - 1] - gains[i])
    return float(np.exp((1 - share) * np.log(rates[i - 1]) + share * np.log(rates[i]))), False


class Curves:
    """Ends and gains of a study, as arrays [arm, rate, seed] of one N, over the seeds that are complete."""

    def __init__(self, study: Study, updates: str):
        self.arms, self.updates = study.arms, updates
        conditions = [one for one in study.conditions if one.startswith(f"{updates}, ")]
        self.rates = sorted(float(one.split("lr ")[1]) for one in conditions)
        by_rate = sorted(conditions, key=lambda one: float(one.split("lr ")[1]))
        runs = {(run.arm, run.condition, run.seed): run for run in study.runs if run.ended}
        keys = [(arm, condition) for arm in self.arms for condition in by_rate]
        seeds = dict.fromkeys(run.seed for run in study.runs)
        self.seeds = [seed for seed in seeds if all((*key, seed) in runs for key in keys)]
        chosen = [runs[*key, seed] for key in keys for seed in self.seeds]
        shape = (len(self.arms), len(self.rates), len(self.seeds))
        self.ends = np.array([SAMPLED.measure(run) for run in chosen]).reshape(shape)
        self.gains = self.ends - np.array([start_of(run) for run in chosen]).reshape(shape)

    def stable(self, arm: int, most: float = np.inf) -> tuple[np.ndarray, int]:
        """The highest stable rate of every seed, and how many of them are edges; a loss counts `most` at most."""
        gains = np.maximum(self.gains[arm], -most)
        found = [highest_stable(self.rates, gains[:, seed].tolist()) for seed in range(len(self.seeds))]
        return np.array([rate for rate, _ in found]), sum(edge for _, edge in found)

    def logs(self, arm: int) -> list[np.ndarray]:
        """Logarithms of the highest stable rates, with losses as they are and with losses of 0.05 at most."""
        return [np.log(self.stable(arm, most)[0]) for most in (np.inf, SMALL_LOSS)]


def every_n(study: Study) -> list[Curves]:
    """Results of each N that has a complete seed."""
    numbers = dict.fromkeys(condition.split(", ")[0] for condition in study.conditions)
    return [curves for curves in (Curves(study, updates) for updates in numbers) if curves.seeds]


def table(study: Study) -> Table:
    """N, arm, mean end at each rate; highest stable rate with interval, seeds at an edge, factor to the baseline.

    Rates are averaged by their logarithm: the middle is the geometric mean, and a difference is a factor. Where the
    next rate ends in collapse the crossing rests on the line, so that the factor is given twice: the last column counts
    a loss as 0.05 at most.
    """
    rows = []
    for curves in every_n(study):
        for i, arm in enumerate(curves.arms):
            ours, theirs = curves.logs(i), curves.logs(0)
            own = _factor(paired_difference(ours[0], np.zeros_like(ours[0])), "{:.2g}")
            factors = [_factor(paired_difference(ours[j], theirs[j]), "{:.2f}") if i else "" for j in (0, 1)]
            ends = [f"{end:.3f}" for end in curves.ends[i].mean(-1)]
            rows.append([curves.updates, arm, *ends, own, f"{curves.stable(i)[1]} of {len(curves.seeds)}", *factors])
    return rows


def _factor(d: PairedDifference, form: str) -> str:
    middle, low, high = (form.format(np.exp(x)) for x in (d.mean, d.low, d.high))
    return f"{middle} [{low}, {high}]"


def at_best(study: Study) -> Table:
    """N, arm, its best rate by the mean end, the end there, and the difference to the baseline at its own best."""
    rows = []
    for curves in every_n(study):
        best = curves.ends.mean(-1).argmax(-1)
        ends = [curves.ends[arm, rate] for arm, rate in enumerate(best)]
        for i, arm in enumerate(curves.arms):
            against = interval(paired_difference(ends[i], ends[0])) if i else ""
            rows.append([curves.updates, arm, f"{curves.rates[best[i]]:g}", f"{ends[i].mean():.3f}", against])
    return rows


def by_updates(study: Study) -> Table:
    """Arm; the highest stable rate of the last N over that of the first, and the same if a loss counts 0.05 at most."""
    few, *_, many = every_n(study)
    return [
        [arm, *(_factor(paired_difference(*logs), "{:.2f}") for logs in zip(many.logs(i), few.logs(i), strict=True))]
        for i, arm in enumerate(few.arms)
    ]


def figure(study: Study) -> Figure:
    """Held-out accuracy at the end against the learning rate, a panel an N: means, and a dot a seed."""
    numbers = every_n(study)
    drawn, axes = panels([f"{SAMPLED.name}, {curves.updates}" for curves in numbers], columns=2, height=3.6)
    for ax, curves in zip(axes, numbers, strict=True):
        places = []
        for i, arm in enumerate(curves.arms):
            look = line(curves.arms, arm)
            ax.plot(curves.rates, curves.ends[i].mean(-1), **look)
            ax.plot(curves.rates, curves.ends[i], "o", color=look["color"], markersize=3, alpha=0.4)
            places.append((float(curves.ends[i, -1].mean()), arm, look["color"]))
        ax.axhline(float((curves.ends - curves.gains).mean()), color=INK, linewidth=0.8)  # the start
        ax.set_xscale("log")
        ax.set_xlabel("learning rate (line: accuracy at the start)", fontsize=8.5, color=INK)
        label_ends(ax, places)
    return drawn


if __name__ == "__main__":
    command(lambda study, _: [table(study), at_best(study), by_updates(study)], figure)
