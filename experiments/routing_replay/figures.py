"""The figures of the page, from the committed data: `python -m experiments.routing_replay.figures` writes results/."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.routing_replay import kept, samplers, scale
from experiments.routing_replay.pooled import Pooled, one_rollout
from experiments.routing_replay.table_parts import mean
from experiments.routing_replay.tables import ONE_ROLLOUT, RESULTS, study
from jaxrl_llm.report.read import Study
from jaxrl_llm.report.style import INK, colour, panels

BATCH = "#9a9a9a"
REAL = "#D55E00"
ROUNDING = 1e-9  # of k3, without noise
SHOWN = 0.13  # a difference beyond it is written at the edge: SAPO's would hide all others


def forest(sweeps: Sequence[Study]) -> Figure:
    """Every arm by rate: the pooled difference to GRPO with its interval, above it each batch with its own."""
    found = one_rollout(*sweeps)
    rates = list(dict.fromkeys(one.labels[0] for one in found))
    titles = [f"{rate} (a rollout of GRPO: {_scale(found, rate)})" for rate in rates]
    drawn, axes = panels(titles, columns=2, height=3.8)
    for ax, rate in zip(axes, rates, strict=True):
        own = [one for one in found if one.labels[0] == rate]
        for place, one in enumerate(own):
            for number, batch in enumerate(one.batches.values()):
                _interval(ax, place - 0.42 + 0.14 * number, batch.mean, batch.low, batch.high, BATCH, 3)
            _interval(ax, place, one.whole.mean, one.whole.low, one.whole.high, INK, 6)
        ax.axvline(0, color=INK, linewidth=0.8)
        ax.set_yticks(range(len(own)), [one.labels[2] for one in own])
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_xlabel("held-out sampled accuracy, difference to GRPO", fontsize=8.5, color=INK)
    return drawn


def finding(sweeps: Sequence[Study]) -> Figure:
    """Three remedies by learning rate: the pooled difference to GRPO after one rollout, with its interval."""
    shown = {"GRPO+R2": "replay (R2)", "GSPO": "GSPO", "SAPO": "SAPO"}
    found = [one for one in one_rollout(*sweeps) if one.labels[2] in shown]
    rates = list(dict.fromkeys(one.labels[0] for one in found))
    title = "one rollout: held-out accuracy minus GRPO's (logarithmic beyond 0.01)"
    drawn, (ax,) = panels([title], columns=1, height=3.4, along="learning rate")
    for shift, (arm, told) in zip((-0.08, 0.0, 0.08), shown.items(), strict=True):
        own = [one for one in found if one.labels[2] == arm]
        x = [rates.index(one.labels[0]) + shift for one in own]
        ink = colour(["GRPO", *shown], arm)
        ax.vlines(x, [one.whole.low for one in own], [one.whole.high for one in own], color=ink, linewidth=1.4)
        ax.plot(x, [one.whole.mean for one in own], "-o", color=ink, linewidth=0.8, markersize=5, label=told)
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set_yscale("symlog", linthresh=0.01)
    ax.set_ylim(-0.6, 0.2)
    ax.set_yticks([-0.3, -0.1, -0.01, 0, 0.01, 0.1], ["-0.3", "-0.1", "-0.01", "0 (GRPO)", "+0.01", "+0.1"])
    ax.minorticks_off()
    ax.set_xticks(range(len(rates)), [rate.removeprefix("lr ") for rate in rates])
    ax.legend(fontsize=8.5, frameon=False, loc="lower left")
    return drawn


def _scale(found: Sequence[Pooled], rate: str) -> str:
    return next(one.labels[1] for one in found if one.labels[0] == rate).split(" ")[0]


def _interval(ax: Axes, y: float, middle: float, low: float, high: float, ink: str, size: float) -> None:
    if abs(middle) <= SHOWN:
        ax.plot([max(low, -SHOWN), min(high, SHOWN)], [y, y], color=ink, linewidth=1.2)
        ax.plot(middle, y, "o", color=ink, markersize=size)
    elif size > 3:
        ax.annotate(f"\u2190 {middle:+.3f}", (0.01, y), xycoords=("axes fraction", "data"), fontsize=8.5, va="center")


def negatives(one_rollout: Study, whole_runs: Study) -> Figure:
    """Draw an arm's gain in one rollout by the gradient of wrong answers that it keeps; and when GSPO ends whole runs
    above the arm that leads there."""
    rates = {"4e-4": "lr 0.0004", "2e-4": "lr 0.0002"}
    titles = [f"one rollout at {rate}: accuracy minus GRPO's" for rate in rates]
    drawn, axes = panels([*titles, "whole runs: GSPO minus negatives cut"], columns=2, height=3.8)
    for axis, rate in zip(axes, rates.values(), strict=False):
        kept.draw_kept(axis, one_rollout, [name for name in one_rollout.conditions if name.endswith(rate)])
    kept.draw_drift(axes[2], whole_runs)
    return drawn


def sizes(measured: Study, anchor: Study) -> Figure:
    """Routing's share by depth, sparsity and drift, with the line and its prediction, and real weights."""
    found, _ = scale.points(measured)
    own = scale.by_condition(anchor)
    own = [
        dataclasses.replace(one, setting=f"SmolLM2{', text' * ('text' in one.setting)},\nKL {one.drift:.2g}")
        for one in own
    ]
    return scale.figure(scale.line_of(found), found, own)


def mismatch(weak: Study, strong: Study, choices: Study) -> Figure:
    """Draw the sampler's gap (k3) that R3 leaves against its size; and the cost of the strongest doses of the choice,
    which are those where GRPO loses, and each remedy leaves of that, by the router that evaluates."""
    titles = ["share of k3 that R3 leaves (%)", "accuracy minus that of GRPO with the exact sampler"]
    drawn, axes = panels(titles, columns=2, height=3.8)
    gated = [(one, noise) for one in (weak, strong) for noise in one.conditions if noise.startswith("N = 4")]
    replayed = [
        (choices, sampler)
        for sampler in choices.conditions
        if not sampler.startswith("router") and any(run.ended for run in choices.select("GRPO+R3", sampler))
    ]
    alone, real = ([one for one in replayed if ("k3" in one[1]) == moved] for moved in (True, False))
    kinds = ("gates and choice moved", BATCH, gated), ("choice alone", INK, alone), ("bfloat16, float8", REAL, real)
    for told, ink, doses in kinds:
        gaps = np.array(
            [[mean(one.select(arm, dose), "kl/sampler") for arm in ("GRPO", "GRPO+R3")] for one, dose in doses]
        )
        gap, left = gaps[gaps[:, 0] > ROUNDING].T
        axes[0].plot(gap, 100 * left / gap, "o", color=ink, markersize=5, label=told)
    axes[0].set_xscale("log")
    axes[0].set_xlabel("k3 between sampler and trainer under GRPO", fontsize=8.5, color=INK)
    axes[0].legend(fontsize=8, frameon=False)
    lost = [sampler for _, sampler in alone if sampler.endswith("k3 0.1")]
    places = [(sampler, router) for sampler in lost for router in samplers.ROUTERS]
    for number, arm in enumerate(choices.arms):
        found = {tuple(one.labels[1:]): one.whole for one in samplers.cost(choices, arm)}
        for x, place in enumerate(places):
            d, at = found[place], x + 0.13 * (number - 2)
            axes[1].plot([at, at], [d.low, d.high], color=colour(choices.arms, arm), linewidth=1.2)
            axes[1].plot(at, d.mean, "o", color=colour(choices.arms, arm), markersize=5, label=arm if not x else None)
    axes[1].axhline(0, color=INK, linewidth=0.8)
    told = [f"{sampler.partition(',')[0]},\n{router} router" for sampler, router in places]
    axes[1].set_xticks(range(len(places)), told, fontsize=7.5)
    axes[1].legend(fontsize=8, frameon=False)
    return drawn


def _part(whole: Study, part: str) -> Study:
    return dataclasses.replace(whole, runs=[run for run in whole.runs if part in run.condition.split(", ")])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sweeps = [study(folder, sweep) for sweep in ONE_ROLLOUT]
        figures = {
            "forest": forest(sweeps),
            "finding": finding(sweeps),
            "negatives": negatives(*(study(folder, name) for name in ("negatives", "negatives_runs"))),
            **{name: kept.figure(study(folder, name)) for name in ("negatives_dose", "negatives_rollouts")},
            "negatives_runs": kept.figure(_part(study(folder, "negatives_runs"), "N = 32")),
            "sizes": sizes(study(folder, "sizes"), study(folder, "anchor")),
            "mismatch": mismatch(*(study(folder, name) for name in ("control", "strong", "choices"))),
        }
        for stem, drawn in figures.items():
            drawn.savefig(RESULTS / f"{stem}.png")


if __name__ == "__main__":
    main()
