"""The reliability curve: how far the probabilities that a model gives to pairs can be believed."""

import numpy as np
from matplotlib.figure import Figure

from jaxrl_llm.report.read import Run, Study
from jaxrl_llm.report.style import INK, label_ends, line, panels

__all__ = ["no_reliability", "reliability_plot"]

_KEYS = ("eval/reliability_confidence", "eval/reliability_accuracy", "eval/reliability_pairs")


def reliability_plot(study: Study, condition: str) -> Figure:
    """Share of held-out pairs that are ordered right against the confidence, at each run's last evaluation.

    Pairs of all seeds of an arm are counted together, bin by bin; on the dashed line a model is calibrated.
    """
    figure, (ax,) = panels(["held-out pairs ordered right, by confidence"], columns=1, height=3.6)
    ax.plot([0.5, 1], [0.5, 1], color="#b0b0b0", linewidth=1, linestyle="--")
    ends = []
    for arm in study.arms:
        bins = [_last(run) for run in study.select(arm, condition) if run.series(_KEYS[0])[0].size]
        if not bins:
            continue
        confidence, accuracy, pairs = np.transpose(bins, (1, 0, 2))
        total = pairs.sum(0)
        held = total > 0
        x, y = (np.nansum(value * pairs, 0)[held] / total[held] for value in (confidence, accuracy))
        look = line(study.arms, arm)
        ax.plot(x, y, **look)
        ends.append((float(x[-1]), float(y[-1]), arm, look["color"]))
    ax.set_xlabel("probability that the model gives to its order", fontsize=8.5, color=INK)
    ax.set_ylim(-0.02, 1.02)
    if len(study.arms) > 1:
        label_ends(ax, ends)
    return figure


def no_reliability(study: Study, condition: str) -> list[str]:
    """Why there is no curve; empty where a run has one."""
    runs = [run for run in study.runs if run.condition == condition and run.series(_KEYS[0])[0].size]
    return [] if runs else ["reliability curve (not logged)"]


def _last(run: Run) -> list[np.ndarray]:
    """Confidence, accuracy and number of pairs of every bin, at the last evaluation."""
    return [run.series(key)[1][-1] for key in _KEYS]
