"""Diagnostic figures: routing by MoE layer, and how far probabilities of pairs and a learnt reward can be trusted."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jaxrl_llm.report.curves import aligned, mean, smooth
from jaxrl_llm.report.read import Study
from jaxrl_llm.report.style import INK, label_ends, line, panels

FLIPS, LOAD = "routing/flips_old_current_by_update", "routing/load_max_by_layer"
_KL = "kl/ref_answer"
_REWARDS = {"reward/reward_model": "score of the reward model", "reward/mean": "reward of the verifier"}
_RELIABILITY = ("eval/reliability_confidence", "eval/reliability_accuracy", "eval/reliability_pairs")


def flip_map(study: Study, condition: str) -> Figure:
    """Experts that differ from the old policy's, by layer and update within a rollout; mean over rollouts and seeds."""
    maps = {}
    for arm in study.arms:
        _, values = aligned(study.select(arm, condition), FLIPS, axes=3)
        if len(values):
            percent = 100 * mean(np.stack([mean(run) for run in values]))
            maps[arm] = range(1, len(percent) + 1), percent
    return _maps(maps, along="update within the rollout", label="% of experts changed", low=0.0)


def load_map(study: Study, condition: str) -> Figure:
    """The load of the busiest expert as a multiple of an even load, by layer and rollout; mean over seeds."""
    maps = {}
    for arm in study.arms:
        steps, values = aligned(study.select(arm, condition), LOAD, axes=2)
        if len(steps):
            maps[arm] = [int(step) for step in steps], mean(values)
    return _maps(maps, along="rollout", label="load of the busiest expert", low=1.0)


def _maps(maps: Mapping[str, tuple[Sequence[int], np.ndarray]], *, along: str, label: str, low: float) -> Figure:
    """A heat map an arm: the numbers along the x axis and values [x, layer]; `low` is the darkest colour of all."""
    figure, axes = panels(list(maps), columns=4, height=2.4, along=along)
    high = float(np.nanmax(np.concatenate([values.ravel() for _, values in maps.values()])))
    colours = {"cmap": "cividis", "vmin": low, "vmax": high if high > low else low + 1}
    for ax, (numbers, values) in zip(axes, maps.values(), strict=True):
        ax.imshow(values.T, aspect="auto", origin="lower", interpolation="none", **colours)
        ax.grid(False)
        ax.set_ylabel("MoE layer", fontsize=8.5, color=INK)
        ax.set_yticks(range(values.shape[1]))
        places = range(0, len(numbers), -(-len(numbers) // 8))
        ax.set_xticks(places, [str(numbers[place]) for place in places])
    bar = figure.colorbar(axes[0].images[0], ax=axes, shrink=0.9, pad=0.01)
    bar.set_label(label, fontsize=8.5, color=INK)
    bar.ax.tick_params(labelsize=8.5)
    return figure


def reliability_plot(study: Study, condition: str) -> Figure:
    """Share of held-out pairs that are ordered right, bin by bin of the confidence, over all seeds of an arm."""
    title, along = "held-out pairs ordered right, by confidence", "probability that the model gives to its order"
    figure, (ax,) = panels([title], columns=1, height=3.6, along=along)
    ax.plot([0.5, 1], [0.5, 1], color="#b0b0b0", linewidth=1, linestyle="--")
    ends = []
    for arm in study.arms:
        runs = [run for run in study.select(arm, condition) if run.series(_RELIABILITY[0])[0].size]
        if not runs:
            continue
        confidence, accuracy, pairs = np.array([[run.series(key)[1][-1] for run in runs] for key in _RELIABILITY])
        total = pairs.sum(0)
        held = total > 0
        x, y = (np.nansum(value * pairs, 0)[held] / total[held] for value in (confidence, accuracy))
        look = line(study.arms, arm)
        ax.plot(x, y, **look)
        ends.append((float(y[-1]), arm, look["color"]))
    ax.set_ylim(-0.02, 1.02)
    if len(study.arms) > 1:
        label_ends(ax, ends)
    return figure


def no_reliability(study: Study, condition: str) -> list[str]:
    """Why there is no reliability curve; empty if there is one."""
    return [] if study.has(_RELIABILITY[0], condition) else ["reliability curve (not logged)"]


def reward_against_kl(study: Study, condition: str) -> Figure:
    """The score of a reward model and the verifier's reward of every rollout, against sqrt(KL) to the start.

    Source: Gao et al., "Scaling laws for reward model overoptimization" (2022), arXiv 2210.10760, whose x axis it is.
    """
    along = "sqrt of the KL to the start (nats an answer)"
    figure, axes = panels(list(_REWARDS.values()), columns=2, height=3.4, along=along)
    for ax, key in zip(axes, _REWARDS, strict=True):
        ends = []
        for arm in study.arms:
            runs = [run for run in study.select(arm, condition) if run.series(key)[1].size and run.series(_KL)[1].size]
            if not runs:
                continue
            look: dict[str, Any] = line(study.arms, arm) | {"marker": ""}
            distance, rewards = np.sqrt(np.maximum(aligned(runs, _KL)[1], 0)), aligned(runs, key)[1]
            for x, y in zip(distance, rewards, strict=True):
                ax.plot(smooth(x), smooth(y), color=look["color"], alpha=0.35, linewidth=0.8)
            x, y = smooth(mean(distance)), smooth(mean(rewards))
            ax.plot(x, y, **look)
            ends.append((float(y[-1]), arm, look["color"]))
        if len(study.arms) > 1:
            label_ends(ax, ends)
    return figure


def no_learnt_reward(study: Study, condition: str) -> list[str]:
    """Why a learnt reward is not drawn against the KL; empty if it is."""
    missing = [key for key in (*_REWARDS, _KL) if not study.has(key, condition)]
    return [f"learnt reward against KL ({', '.join(missing)} not logged)"] if missing else []
