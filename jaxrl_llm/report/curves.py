"""Learning curves: metrics against rollouts, one panel a metric and one line an arm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from jaxrl_llm.report.read import Run, Study
from jaxrl_llm.report.statistics import half_width
from jaxrl_llm.report.style import INK, label_ends, line, panels

_DECADES = 1e6  # highest over lowest value of a logarithmic axis, at most
_WHISKERS = 7  # along a curve
# In a panel of two metrics dashes tell the metrics apart, not the arms: the second has dashes and hollow marks.
_FIRST, _SECOND = {"linestyle": "-"}, {"linestyle": "--", "markerfacecolor": "white"}


@dataclass(frozen=True)
class Curve:
    """One panel: a metric under its title ("": its name), and with `beside` a second one, drawn dashed."""

    key: str
    title: str = ""
    scale: str = "linear"
    percent: bool = False
    beside: str | None = None
    names: tuple[str, str] = ("", "")  # of the two metrics, for the legend

    def titled(self, study: Study) -> str:
        return self.title or study.named(self.key)

    @property
    def keys(self) -> dict[str, dict[str, Any]]:
        """The metrics, each with what its lines change in the look of an arm."""
        return {self.key: {}} if self.beside is None else {self.key: _FIRST, self.beside: _SECOND}

    def absent(self, study: Study, condition: str) -> str:
        """Why the panel would be empty or a flat line ("not logged", "0 throughout"); "" if it shows something."""
        values = np.concatenate([study.values(key, condition) for key in self.keys])
        shown = values[values > 0] if self.scale == "log" else values
        if not len(values):
            return "not logged"
        if len(shown) and np.ptp(values) > 0:
            return ""
        constant = f"{100 * values[0]:.4g} %" if self.percent else f"{values[0]:.4g}"
        return f"{constant} throughout" if np.ptp(values) == 0 else "never above 0"


def curves(study: Study, condition: str, panel: Sequence[Curve]) -> Figure:
    """One line an arm: the mean over seeds, with whiskers (`whiskers`) unless two metrics share a panel.

    Panels that would show nothing are left out (`Curve.absent`).
    """
    panel = [curve for curve in panel if not curve.absent(study, condition)]
    figure, axes = panels([curve.titled(study) for curve in panel], columns=3, along="rollout")
    for ax, curve in zip(axes, panel, strict=True):
        ends = []
        for place, arm in enumerate(study.arms):
            runs, look = study.select(arm, condition), line(study.arms, arm)
            dodge = (place - (len(study.arms) - 1) / 2) / len(study.arms)
            drawn = [_draw(ax, runs, curve, key, look | own, dodge) for key, own in curve.keys.items()]
            ends += [(end, arm, look["color"]) for end in drawn if end is not None][:1]
        _scale(ax, curve)
        if curve.beside is not None:
            lines = [Line2D([], [], color=INK, marker="o", **own) for own in curve.keys.values()]
            ax.legend(lines, curve.names, fontsize=8, labelcolor=INK, frameon=False, handlelength=3)
        if len(study.arms) > 1:
            label_ends(ax, ends)
    return figure


def _draw(ax: Axes, runs: Sequence[Run], curve: Curve, key: str, look: dict[str, Any], dodge: float) -> float | None:
    """Draw the mean over the runs, with whiskers unless it shares the panel; returns the height at which it ends."""
    steps, values = aligned(runs, key)
    if not len(steps):
        return None
    if curve.scale == "log":
        values = np.where(values > 0, values, np.nan)
    middle, few = mean(values), len(steps) <= 12
    if len(values) > 1 and curve.beside is None:
        at = np.unique(np.linspace(0, len(steps) - 1, _WHISKERS).round().astype(int))
        spacing = np.ptp(steps) / _WHISKERS  # the arms' whiskers are drawn side by side
        whiskers(ax, steps[at] + 0.5 * spacing * dodge, values[:, at], look["color"])
    drawn = middle if few else smooth(middle)
    if not few:
        ax.plot(steps, middle, color=look["color"], alpha=0.35, linewidth=0.8)
    known = np.isfinite(drawn)
    apart = known & ~np.pad(known, (1, 0))[:-1] & ~np.pad(known, (0, 1))[1:]  # no line leads to these points
    ax.plot(steps, drawn, markevery=None if few else apart, **look)
    return float(drawn[known][-1]) if known.any() else None


def whiskers(ax: Axes, places: np.ndarray, values: np.ndarray, ink: str) -> None:
    """The t interval of the mean of values [seed, place] at each place; it may leave the axis, which spans seeds.

    That of two seeds, 13 times as long as their distance, would leave the panel: a line from one to the other instead.
    """
    known, middle = np.ma.masked_invalid(values), mean(values)
    low, high = (np.ma.filled(end, np.nan) for end in (known.min(0), known.max(0)))
    half = np.where(known.count(0) > 2, half_width(values), (high - low) / 2)
    ends = np.array([middle - half, middle + half])
    points = np.stack(np.broadcast_arrays(places, np.clip(ends, low, high)), -1).reshape(-1, 2)
    ax.update_datalim(points[np.isfinite(points).all(-1)])
    bars = np.stack(np.broadcast_arrays(places, ends), -1).swapaxes(0, 1)
    ax.add_collection(LineCollection(list(bars), colors=ink, alpha=0.55, linewidths=1.1), autolim=False)


def _scale(ax: Axes, curve: Curve) -> None:
    ax.set_yscale(curve.scale)
    if curve.scale == "log":
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        low, high = ax.get_ylim()
        low = max(low, high / _DECADES)  # the ratios of a collapsed run, all one, would stretch it to rounding errors
        ax.set_ylim(low, high)
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=7))
        ax.yaxis.set_minor_locator(NullLocator())
    if curve.percent:
        ax.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.3g} %")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def aligned(runs: Sequence[Run], key: str, axes: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """The steps that any run has, and values [run, step, ...], NaN where a run lacks the step.

    A run's series has `axes` axes: 1 for a number a step, 2 for a list, 3 for a list of lists. Runs without the key are
    left out, and so are runs whose lists have another length than the first run's.
    """
    series = [run.series(key) for run in runs]
    series = [(steps, values) for steps, values in series if values.ndim == axes and len(values)]
    shape = series[0][1].shape[1:] if series else ()
    series = [(steps, values) for steps, values in series if values.shape[1:] == shape]
    steps = np.unique(np.concatenate([np.zeros(0), *(steps for steps, _ in series)]))
    values = np.full((len(series), len(steps), *shape), np.nan)
    for row, (own, value) in zip(values, series, strict=True):
        row[np.searchsorted(steps, own)] = value
    return steps, values


def mean(values: np.ndarray) -> np.ndarray:
    """The mean over the first axis of what is finite, NaN where nothing is."""
    return np.ma.filled(np.ma.masked_invalid(values).mean(0), np.nan)


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average over about a fifteenth of the run; NaN stays NaN and does not spread.

    The window narrows towards both ends, so the first and the last value stay where they are.
    """
    most = max(len(values) // 30, 1)
    reach = [min(most, i, len(values) - 1 - i) for i in range(len(values))]
    windows = [values[i - r : i + r + 1] for i, r in enumerate(reach)]
    means = np.array([np.nanmean(window) if np.any(np.isfinite(window)) else np.nan for window in windows])
    return np.where(np.isfinite(values), means, np.nan)
