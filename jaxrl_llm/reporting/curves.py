"""Learning curves: metrics against rollouts, one panel a metric and one line an arm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from jaxrl_llm.reporting.read import Run, Study
from jaxrl_llm.reporting.style import INK, colour, label_ends, panels

__all__ = ["Curve", "aligned", "curves", "mean"]


@dataclass(frozen=True)
class Curve:
    """One panel: a metric key, its title, the scale of its axis; a second key may stand beside it, dashed."""

    key: str
    title: str
    scale: str = "linear"
    percent: bool = False
    beside: str | None = None
    names: tuple[str, str] = ("", "")  # of the two keys, for the legend

    @property
    def keys(self) -> Sequence[str]:
        return (self.key,) if self.beside is None else (self.key, self.beside)


def curves(study: Study, condition: str, panel: Sequence[Curve]) -> Figure:
    """One panel a metric, one line an arm (mean over seeds), a band from the lowest to the highest seed.

    A panel of two metrics has a solid and a dashed line an arm and no bands, which would hide them.
    """
    panel = [curve for curve in panel if any(study.has(key, condition) for key in curve.keys)]
    figure, axes = panels([curve.title for curve in panel], columns=3)
    for ax, curve in zip(axes, panel, strict=True):
        ends = []
        for arm in study.arms:
            ink, runs = colour(study.arms, arm), study.select(arm, condition)
            drawn = [_line(ax, runs, curve, key, ink) for key in curve.keys]
            ends += [(*end, arm, ink) for end in drawn if end is not None][:1]
        _scale(ax, curve)
        if curve.beside is not None:
            lines = [Line2D([], [], **_look(curve, key, INK)) for key in curve.keys]
            ax.legend(lines, curve.names, fontsize=8, labelcolor=INK, frameon=False, handlelength=3)
        if len(study.arms) > 1:
            label_ends(ax, ends)
    return figure


def _line(ax: Axes, runs: Sequence[Run], curve: Curve, key: str, ink: str) -> tuple[float, float] | None:
    """Draw the mean over the runs, with its band unless it shares the panel; returns the last point of the line."""
    steps, values = aligned(runs, key)
    if not len(steps):
        return None
    if curve.scale == "log":
        values = np.where(values > 0, values, np.nan)
    middle = mean(values)
    if len(values) > 1 and curve.beside is None:
        ax.fill_between(steps, _least(values), _most(values), color=ink, alpha=0.16, linewidth=0)
    few = len(steps) <= 12
    smooth = middle if few else _smooth(middle)
    if not few:
        ax.plot(steps, middle, color=ink, alpha=0.35, linewidth=0.8)
    known = np.isfinite(smooth)
    apart = known & ~np.pad(known, (1, 0))[:-1] & ~np.pad(known, (0, 1))[1:]  # no line leads to these points
    ax.plot(steps, smooth, linewidth=2, markevery=None if few else apart, **_look(curve, key, ink))
    finite = np.flatnonzero(known)
    return (float(steps[finite[-1]]), float(smooth[finite[-1]])) if len(finite) else None


def _look(curve: Curve, key: str, ink: str) -> dict[str, Any]:
    """Solid with full dots, or dashed with hollow ones for the key beside."""
    dashed = key == curve.beside
    look = {"linestyle": "--", "markerfacecolor": "white"} if dashed else {"linestyle": "-"}
    return {"color": ink, "marker": "o", "markersize": 3.5} | look


def _scale(ax: Axes, curve: Curve) -> None:
    ax.set_yscale(curve.scale)
    if curve.scale == "log":
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        low, high = ax.get_ylim()
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=7))
        ax.yaxis.set_minor_locator(NullLocator())
    if curve.percent:
        ax.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.3g} %")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    ax.set_xlabel("rollout", fontsize=8.5, color=INK)


def aligned(runs: Sequence[Run], key: str, axes: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """The steps that any run has, and values [run, step, ...], NaN where a run lacks the step.

    Args:
        runs: those without the key are left out, and those with lists of another length than the first.
        key: the metric.
        axes: of one run's series: 1 for a number a step, 2 for a list a step.
    """
    found = [run.series(key) for run in runs]
    found = [(steps, values) for steps, values in found if values.ndim == axes and len(values)]
    found = [(steps, values) for steps, values in found if values.shape[1:] == found[0][1].shape[1:]]
    steps = np.unique(np.concatenate([steps for steps, _ in found])) if found else np.zeros(0)
    values = np.full((len(found), len(steps), *(found[0][1].shape[1:] if found else ())), np.nan)
    for row, (own, value) in zip(values, found, strict=True):
        row[np.searchsorted(steps, own)] = value
    return steps, values


def _quiet(reduce: Callable[..., np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    def over_first_axis(values: np.ndarray) -> np.ndarray:
        empty = ~np.any(np.isfinite(values), 0)
        return np.where(empty, np.nan, reduce(np.where(empty, 0, values), axis=0))

    return over_first_axis


mean, _least, _most = _quiet(np.nanmean), _quiet(np.nanmin), _quiet(np.nanmax)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average over about a fifteenth of the run; NaN stays NaN and does not spread."""
    reach = max(len(values) // 30, 1)
    windows = [values[max(i - reach, 0) : i + reach + 1] for i in range(len(values))]
    means = np.array([np.nanmean(window) if np.any(np.isfinite(window)) else np.nan for window in windows])
    return np.where(np.isfinite(values), means, np.nan)
