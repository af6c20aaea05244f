"""Figures of what runs came to: differences of arms, time to collapse, and outcomes by condition."""

import numpy as np
from matplotlib.figure import Figure

from jaxrl_llm.report.comparisons import Outcome, compare
from jaxrl_llm.report.curves import mean, whiskers
from jaxrl_llm.report.read import Study
from jaxrl_llm.report.statistics import survival
from jaxrl_llm.report.style import INK, colour, label_ends, line, name_places, panels


def survival_plot(study: Study, condition: str) -> Figure:
    """Share of runs that have not collapsed, against rollouts (Kaplan-Meier)."""
    figure, (ax,) = panels(["share of runs not collapsed"], columns=1, height=3.0, along="rollout")
    observed = {arm: [run.collapse() for run in study.select(arm, condition)] for arm in study.arms}
    observed = {arm: [end for end in ends if np.isfinite(end[0])] for arm, ends in observed.items()}
    last = max([1.0, *(time for runs in observed.values() for time, _ in runs)])
    ends = []
    for arm, runs in observed.items():
        if not runs:
            continue
        times, alive = survival([time for time, _ in runs], [collapsed for _, collapsed in runs])
        times, alive = np.append(times, last), np.append(alive, alive[-1])
        look = line(study.arms, arm) | {"marker": "", "linewidth": 2.2}
        ax.step(times, alive, where="post", **look)
        censored = [time for time, collapsed in runs if not collapsed]
        shown = [alive[np.searchsorted(times, time, side="right") - 1] for time in censored]
        ax.plot(censored, shown, "|", color=look["color"], markersize=8)
        survivors = f"{arm}  {sum(not collapsed for _, collapsed in runs)}/{len(runs)}"
        ends.append((float(alive[-1]), survivors, look["color"]))
    ax.set_ylim(-0.04, 1.04)
    label_ends(ax, ends)
    return figure


def nothing_fell(study: Study, condition: str) -> list[str]:
    """Why there is no survival to draw; empty if a run collapsed."""
    runs = [run for run in study.runs if run.condition == condition and run.series("reward/mean")[0].size]
    if not runs:
        return ["time to collapse (not logged)"]
    return [] if any(run.collapse()[1] for run in runs) else [f"time to collapse (no run of {len(runs)} collapsed)"]


def forest_plot(study: Study, condition: str) -> Figure:
    """Differences to the baseline with 95 % t intervals, one panel an outcome; hollow below an arm: each commit."""
    compared = [c for c in compare(study, condition) if c.difference.n > 1]
    outcomes = list(dict.fromkeys(c.outcome.title for c in compared))
    rows = {title: [c for c in compared if c.outcome.title == title] for title in outcomes}
    tallest = max(sum(1 + len(c.batches) for c in rows[name]) for name in outcomes)
    titles = [f"{name}\ndifference to {study.baseline}" for name in outcomes]
    figure, axes = panels(titles, columns=2, height=1.1 + 0.22 * tallest)
    for ax, name in zip(axes, outcomes, strict=True):
        labels = []
        for c in rows[name]:
            ink = colour(study.arms, c.arm)
            for label, d in ((c.arm, c.difference), *c.batches):
                whole, y = d is c.difference, -len(labels)
                if np.isfinite(d.low):
                    ax.plot([d.low, d.high], [y, y], color=ink, linewidth=2.4 if whole else 1.2)
                ax.plot(d.mean, y, "o" if whole else "s", color=ink, markerfacecolor=ink if whole else "white")
                labels.append(label if whole else f"{label}, {d.n}")
        ax.axvline(0, color=INK, linewidth=0.8)
        ax.set_yticks([-i for i in range(len(labels))], labels)
        ax.set_ylim(0.6 - len(labels), 0.6)
        ax.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    return figure


def no_pairs(study: Study, condition: str) -> list[str]:
    """Why there is no forest to draw; empty if some arm has an interval."""
    enough = any(c.difference.n > 1 for c in compare(study, condition))
    return [] if enough else ["paired differences (need two arms with two seeds that have ended)"]


def outcome_by_condition(study: Study, outcome: Outcome) -> Figure:
    """One outcome against the conditions of the sweep: a dot a seed, a line through the means with t intervals."""
    figure, (ax,) = panels([outcome.title], columns=1, height=3.4)
    ends = []
    for place, arm in enumerate(study.arms):
        look, means = line(study.arms, arm), []
        for x, condition in enumerate(study.conditions):
            values = np.array([outcome.measure(run) for run in study.select(arm, condition)], np.float64)
            at = x + 0.03 * (place - (len(study.arms) - 1) / 2)
            ax.plot(np.full(len(values), at), values, "o", color=look["color"], alpha=0.45, markersize=4)
            if len(values) > 1:
                whiskers(ax, np.array([at]), values[:, None], look["color"])
            means.append((at, float(mean(values)) if len(values) else float("nan")))
        ax.plot([x for x, _ in means], [y for _, y in means], **look)
        ends += [(y, arm, look["color"]) for _, y in means if np.isfinite(y)][-1:]
    name_places(ax, study.conditions)
    label_ends(ax, ends)
    return figure


def differences_by_condition(study: Study) -> Figure:
    """Differences to the baseline with 95 % t intervals against the conditions, one panel an outcome, a line an arm."""
    compared = [[c for c in compare(study, one) if c.difference.n > 1] for one in study.conditions]
    outcomes = list(dict.fromkeys(c.outcome.title for row in compared for c in row))
    titles = [f"{name}\ndifference to {study.baseline}" for name in outcomes]
    figure, axes = panels(titles or ["no pairs"], columns=1, height=3.4)
    others = study.arms[1:]
    for ax, name in zip(axes, outcomes, strict=False):
        ends = []
        for place, arm in enumerate(others):
            look = line(study.arms, arm)
            found = [(x, c) for x, row in enumerate(compared) for c in row if (c.arm, c.outcome.title) == (arm, name)]
            at = [x + 0.06 * (place - (len(others) - 1) / 2) for x, _ in found]
            differences = [c.difference for _, c in found]
            ax.plot(at, [d.mean for d in differences], **look)
            ax.vlines(at, [d.low for d in differences], [d.high for d in differences], look["color"], linewidth=1.6)
            ends += [(d.mean, arm, look["color"]) for d in differences[-1:]]
        ax.axhline(0, color=INK, linewidth=0.8)
        name_places(ax, study.conditions)
        label_ends(ax, ends)
    return figure
