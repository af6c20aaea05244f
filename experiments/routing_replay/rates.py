"""The learning rates that each arm of `curves` bears: table and figure for this page.

    python -m experiments.routing_replay.rates runs/routing_replay/curves                  # prints Markdown
    python -m experiments.routing_replay.rates runs/routing_replay/curves --figure OUT.png --pack OUT.tar.xz

A rate is stable for a seed if held-out sampled accuracy ends no lower than it started, there and at every rate between
it and the one that ends highest. The highest stable rate is where the end crosses the start, on the line between the
last stable rate and the next one, over the logarithm of the rate; at an edge of the rates that were tried it is the
edge, and counted as such.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.routing_replay.branches import SAMPLED, pack
from jaxrl_llm.reporting.read import Study, load
from jaxrl_llm.reporting.statistics import LEVEL, paired_difference
from jaxrl_llm.reporting.style import INK, label_ends, line, panels


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
        self.gains = self.ends - np.array([run.value("eval/pass_at_1", at=0) for run in chosen]).reshape(shape)

    def stable(self, arm: int) -> tuple[np.ndarray, int]:
        """The highest stable rate of every seed, and how many of them are edges."""
        found = [highest_stable(self.rates, self.gains[arm, :, seed].tolist()) for seed in range(len(self.seeds))]
        return np.array([rate for rate, _ in found]), sum(edge for _, edge in found)


def every_n(study: Study) -> list[Curves]:
    """Of each N that has a complete seed."""
    numbers = dict.fromkeys(condition.split(", ")[0] for condition in study.conditions)
    return [curves for curves in (Curves(study, updates) for updates in numbers) if curves.seeds]


def table(study: Study) -> list[list[str]]:
    """N, arm, mean end at each rate; highest stable rate with interval, seeds at an edge, factor to the baseline.

    Rates are averaged by their logarithm: the middle is the geometric mean, and a difference is a factor.
    """
    rows = []
    for curves in every_n(study):
        logs = [np.log(curves.stable(arm)[0]) for arm in range(len(curves.arms))]
        for i, arm in enumerate(curves.arms):
            own = paired_difference(logs[i], np.zeros_like(logs[i]))
            middle, low, high = (f"{np.exp(x):.2g}" for x in (own.mean, own.low, own.high))
            factor = paired_difference(logs[i], logs[0])
            told = ", ".join(f"{np.exp(x):.2f}" for x in (factor.low, factor.high))
            against = f"{np.exp(factor.mean):.2f} [{told}]" if i else ""
            ends = [f"{end:.3f}" for end in curves.ends[i].mean(-1)]
            edges = f"{curves.stable(i)[1]} of {len(curves.seeds)}"
            rows.append([curves.updates, arm, *ends, f"{middle} [{low}, {high}]", edges, against])
    return rows


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
            places.append((curves.rates[-1], float(curves.ends[i, -1].mean()), arm, look["color"]))
        ax.axhline(float((curves.ends - curves.gains).mean()), color=INK, linewidth=0.8)  # the start
        ax.set_xscale("log")
        ax.set_xlabel("learning rate (line: accuracy at the start)", fontsize=8.5, color=INK)
        label_ends(ax, places)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--pack", type=Path)
    given = parser.parse_args()
    study = load(given.dir)
    rates = [f"{rate:g}" for rate in every_n(study)[0].rates]
    header = ["N", "arm", *rates, f"highest stable rate, {100 * LEVEL:.0f} % interval", "at an edge", "factor to GRPO"]
    rows = [header, ["---"] * len(header), *table(study)]
    print("".join(f"| {' | '.join(cells)} |\n" for cells in rows), end="")
    if given.figure:
        figure(study).savefig(given.figure)
    if given.pack:
        pack(given.dir, given.pack, "metrics.jsonl")


if __name__ == "__main__":
    main()
