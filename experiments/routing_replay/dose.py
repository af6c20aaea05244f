"""The dose at which replay begins to pay: its effect in branches against what changed experts do to the ratio.

    python -m experiments.routing_replay.dose runs/routing_replay/dose                  # prints Markdown
    python -m experiments.routing_replay.dose runs/routing_replay/dose --figure OUT.png

Each setting of the sweep is one point. The dose is measured in the baseline's branches, over whole rollouts after the
last update: the variance of log r that the changed selection of experts explains, as a number and as a share of Var(log
r), and the share of tokens whose ratio it moves by more than 0.2 in its logarithm. The response is held-out sampled
accuracy, replay minus baseline, with an interval over trajectories.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from experiments.routing_replay.branches import difference, pairs
from experiments.routing_replay.table_parts import (
    SAMPLED,
    Table,
    command,
    interval,
    mean,
    share_of_variance,
    start_to_end,
)
from jaxrl_llm.report.comparisons import probability
from jaxrl_llm.report.read import Run, Study
from jaxrl_llm.report.statistics import PairedDifference, holm, paired_difference
from jaxrl_llm.report.style import INK, panels

REPLAY = "GRPO+R2"
USUAL = "as above"  # 4 layers, 16 experts, top-4
SCALED = ("8 layers", "16 layers", "64 experts, top-2", "64 experts, top-1")  # that setting but for depth or sparsity
MEASURES: dict[str, Callable[[Sequence[Run]], float]] = {
    "share of Var(log r)": lambda runs: share_of_variance(runs)[0],
    "tokens moved beyond 0.2": lambda runs: mean(runs, "routing/part_above_0.2"),
    "experts changed": lambda runs: mean(runs, "routing/flips_fresh"),
    "Var(log r)": lambda runs: mean(runs, "routing/log_ratio_var"),
    "KL to the old policy": lambda runs: mean(runs, "kl/old"),
}


@dataclass(frozen=True)
class Dose:
    """A setting: what routing does to the ratio without replay, and what replay does to the policy."""

    setting: str
    states: int
    ends: str  # held-out sampled accuracy of the states and of the baseline's branches
    flips: float
    variance: float
    share: float
    beyond: float
    effect: PairedDifference
    over_gain: PairedDifference  # the effect less what the rollout itself gains


def doses(study: Study) -> list[Dose]:
    """Every setting, from the lowest share to the highest."""
    found = []
    for setting in study.conditions:
        runs = study.select(study.baseline, setting)
        seeds, start, baseline, replayed = pairs(study, REPLAY, setting)
        found.append(
            Dose(
                setting,
                len(runs),
                start_to_end(runs),
                flips=mean(runs, "routing/flips_fresh"),
                variance=mean(runs, "routing/log_ratio_var"),
                share=share_of_variance(runs)[0],
                beyond=mean(runs, "routing/part_above_0.2"),
                effect=difference(study, REPLAY, setting),
                over_gain=paired_difference(replayed - baseline, baseline - start, seeds.astype(int).tolist()),
            )
        )
    return sorted(found, key=lambda dose: dose.share)


def table(study: Study) -> Table:
    """Setting, states, accuracy, experts changed, Var(log r), routing's share and part, beyond 0.2, effect, bounds."""
    return [
        [
            dose.setting,
            str(dose.states),
            dose.ends,
            f"{100 * dose.flips:.1f} %",
            f"{dose.variance:.2g}",
            f"{100 * dose.share:.0f} %",
            f"{dose.share * dose.variance:.2g}",
            f"{100 * dose.beyond:.2f} %",
            interval(dose.effect),
            f"{dose.effect.detectable:.3f}",
            interval(dose.over_gain),
        ]
        for dose in doses(study)
    ]


def by_seed(study: Study, setting: str, measure: str) -> list[float]:
    """A measure of the baseline's branches in each seed of a setting."""
    runs = study.select(study.baseline, setting)
    seeds = sorted({run.seed for run in runs}, key=int)
    return [MEASURES[measure]([run for run in runs if run.seed == seed]) for seed in seeds]


def factors(study: Study, setting: str) -> list[PairedDifference]:
    """Logarithm of each measure's factor to the usual setting, paired by seed."""
    logs = [tuple(np.log(by_seed(study, one, measure)) for one in (setting, USUAL)) for measure in MEASURES]
    return [paired_difference(here, usual) for here, usual in logs]


def scaling(study: Study) -> Table:
    """Setting, every measure's factor to the usual setting with interval, and the corrected p of the share."""
    found = {setting: factors(study, setting) for setting in SCALED}
    corrected = holm([own[0].p for own in found.values()])
    return [
        [setting, *map(_factor, own), probability(p)]
        for (setting, own), p in zip(found.items(), corrected, strict=True)
    ]


def _factor(d: PairedDifference) -> str:
    middle, low, high = np.exp([d.mean, d.low, d.high])
    return f"x{middle:.2f} [{low:.2f}, {high:.2f}]"


def figure(study: Study) -> Figure:
    """The effect of replay against both measures of the dose, a point and its interval a setting."""
    title = f"{SAMPLED.name}, {REPLAY} - {study.baseline}"
    drawn, axes = panels([title, title], columns=2, height=5.0)
    names = ("share of Var(log r) that routing explains (%)", "tokens that routing moves by more than 0.2 (%)")
    for ax, name, measure in zip(axes, names, ("share", "beyond"), strict=True):
        for number, dose in enumerate(doses(study)):
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


if __name__ == "__main__":
    command(lambda study, _: [table(study), scaling(study)], figure)
