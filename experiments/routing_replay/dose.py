"""Where replay begins to pay: its effect in branches against what changed experts do to the ratio.

    python -m experiments.routing_replay.dose runs/routing_replay/dose                  # prints Markdown
    python -m experiments.routing_replay.dose runs/routing_replay/dose --figure OUT.png

Each setting of the sweep is one point. The dose is measured in the baseline's branches, over whole rollouts after the
last update: the variance of log r that the changed selection of experts explains, as a number and as a share of Var(log
r), and the share of tokens whose ratio it moves by more than 0.2 in its logarithm. The response is held-out sampled
accuracy, replay minus baseline, with an interval over trajectories.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.routing_replay.branches import SAMPLED, difference, interval, mean, shares_of_variance
from jaxrl_llm.reporting.read import Study, load
from jaxrl_llm.reporting.statistics import PairedDifference
from jaxrl_llm.reporting.style import INK, panels


@dataclass(frozen=True)
class Dose:
    """A setting: what routing does to the ratio without replay, and what replay does to the policy."""

    setting: str
    states: int
    start: float  # held-out sampled accuracy of the states
    end: float  # of the baseline's branches
    flips: float
    variance: float
    share: float
    beyond: float
    effect: PairedDifference


def doses(study: Study, arm: str) -> list[Dose]:
    """Every setting, from the lowest share to the highest."""
    found = []
    for setting in study.conditions:
        runs = study.select(study.baseline, setting)
        weights, shares = shares_of_variance(runs)
        share = float(np.average(shares, weights=weights)) if len(shares) else float("nan")
        start, end = (float(np.mean([run.value("eval/pass_at_1", at=at) for run in runs])) for at in (0, -1))
        flips, beyond = mean(runs, "routing/flips_fresh"), mean(runs, "routing/part_above_0.2")
        variance, effect = float(np.mean(weights)), difference(study, arm, setting)
        found.append(Dose(setting, len(runs), start, end, flips, variance, share, beyond, effect))
    return sorted(found, key=lambda dose: dose.share)


def table(study: Study, arm: str) -> list[list[str]]:
    """Setting, states, accuracy, experts changed, Var(log r), routing's share and part, beyond 0.2, effect."""
    return [
        [
            dose.setting,
            str(dose.states),
            f"{dose.start:.3f} -> {dose.end:.3f}",
            f"{100 * dose.flips:.1f} %",
            f"{dose.variance:.2g}",
            f"{100 * dose.share:.0f} %",
            f"{dose.share * dose.variance:.2g}",
            f"{100 * dose.beyond:.2f} %",
            interval(dose.effect),
            f"{dose.effect.detectable:.3f}",
        ]
        for dose in doses(study, arm)
    ]


def figure(study: Study, arm: str) -> Figure:
    """The effect of replay against both measures of the dose, a point and its interval a setting."""
    title = f"{SAMPLED.name}, {arm} - {study.baseline}"
    drawn, axes = panels([title, title], columns=2, height=5.0)
    names = ("share of Var(log r) that routing explains (%)", "tokens that routing moves by more than 0.2 (%)")
    for ax, name, measure in zip(axes, names, ("share", "beyond"), strict=True):
        for number, dose in enumerate(doses(study, arm)):
            x, effect = 100 * getattr(dose, measure), dose.effect
            ax.plot([x, x], [effect.low, effect.high], color=INK, linewidth=1.2)
            ax.plot(x, effect.mean, "o", color=INK, markersize=5, label=f"{number + 1}  {dose.setting}")
            place = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center"}
            ax.annotate(str(number + 1), (x, effect.high), fontsize=8.5, **place)
        ax.axhline(0, color=INK, linewidth=0.8)
        ax.set_xlabel(name, fontsize=8.5, color=INK)
    axes[1].set_xscale("log")
    axes[1].xaxis.set_major_formatter("{x:g}")
    axes[1].xaxis.set_minor_formatter("")
    axes[0].legend(fontsize=8, frameon=False, handlelength=0, handletextpad=0, markerscale=0)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--arm", default="GRPO+R2")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    study = load(given.dir)
    print("".join(f"| {' | '.join(cells)} |\n" for cells in table(study, given.arm)), end="")
    if given.figure:
        figure(study, given.arm).savefig(given.figure)


if __name__ == "__main__":
    main()
