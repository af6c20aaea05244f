"""The figures of a report: each takes a study and one of its conditions; PLOTS lists them with what they need."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from jaxrl_llm.reporting.read import CLIPPED, Run, Study
from jaxrl_llm.reporting.statistics import survival
from jaxrl_llm.reporting.style import INK, colour, label_ends, panels

__all__ = ["PLOTS", "Curve", "Plot", "curves", "flip_map", "outcome_by_condition", "survival_plot"]


@dataclass(frozen=True)
class Curve:
    """One panel of learning curves: a metric key, its title, and the scale of its axis."""

    key: str
    title: str
    scale: str = "linear"
    percent: bool = False


@dataclass(frozen=True)
class Plot:
    """A figure of the page: file stem, heading, what to see in it, the keys that it needs, and how it is drawn."""

    stem: str
    heading: str
    caption: str
    needs: Sequence[str]
    draw: Callable[[Study, str], Figure]


def curves(study: Study, condition: str, panel: Sequence[Curve]) -> Figure:
    """One panel a metric, one line an arm (mean over seeds), a band from the lowest to the highest seed."""
    panel = [curve for curve in panel if study.has(curve.key, condition)]
    figure, axes = panels([curve.title for curve in panel], columns=3)
    for ax, curve in zip(axes, panel, strict=True):
        ends = []
        for arm in study.arms:
            ink = colour(study.arms, arm)
            steps, values = _aligned(study.select(arm, condition), curve.key)
            if not len(steps):
                continue
            if curve.scale == "log":
                values = np.where(values > 0, values, np.nan)
            middle = _mean(values)
            if len(values) > 1:
                ax.fill_between(steps, _least(values), _most(values), color=ink, alpha=0.16, linewidth=0)
            few = len(steps) <= 12
            smooth = middle if few else _smooth(middle)
            if not few:
                ax.plot(steps, middle, color=ink, alpha=0.35, linewidth=0.8)
            ax.plot(steps, smooth, color=ink, linewidth=2, marker="o" if few else None, markersize=3.5)
            finite = np.flatnonzero(np.isfinite(smooth))
            if len(finite):
                ends.append((float(steps[finite[-1]]), float(smooth[finite[-1]]), arm, ink))
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
        if len(study.arms) > 1:
            label_ends(ax, ends)
    return figure


def other_routing(study: Study, condition: str) -> Figure:
    """Every number under routing/ that no other figure shows, one panel each."""
    rows = [row for run in study.runs if run.condition == condition for row in run.rows]
    keys = {key for row in rows for key, value in row.items() if key.startswith("routing/") and np.ndim(value) == 0}
    shown = {curve.key for curve in (*_LEARNING, *_DECOMPOSITION)}
    titles = [Curve(key, key.removeprefix("routing/").replace("_", " ")) for key in sorted(keys - shown)]
    return curves(study, condition, titles)


def survival_plot(study: Study, condition: str) -> Figure:
    """Share of runs that have not collapsed, against rollouts (Kaplan-Meier)."""
    figure, (ax,) = panels(["share of runs not collapsed"], columns=1, height=3.0)
    ends, last = [], 1.0
    for arm in study.arms:
        runs = [run for run in study.select(arm, condition) if run.rows]
        last = max([last, *(run.collapse()[0] for run in runs)])
    for place, arm in enumerate(study.arms):
        found = [run.collapse() for run in study.select(arm, condition) if run.rows]
        if not found:
            continue
        times, alive = survival([time for time, _ in found], [collapsed for _, collapsed in found])
        ink, offset = colour(study.arms, arm), 0.012 * (place - (len(study.arms) - 1) / 2)
        times, alive = np.append(times, last), np.append(alive, alive[-1]) + offset
        ax.step(times, alive, where="post", color=ink, linewidth=2)
        censored = [time for time, collapsed in found if not collapsed]
        shown = [alive[np.searchsorted(times, time, side="right") - 1] for time in censored]
        ax.plot(censored, shown, "|", color=ink, markersize=8)
        ends.append((last, float(alive[-1]), f"{arm}  {sum(not c for _, c in found)}/{len(found)}", ink))
    ax.set_ylim(-0.04, 1.06)
    ax.set_xlabel("rollout", fontsize=8.5, color=INK)
    label_ends(ax, ends)
    return figure


def flip_map(study: Study, condition: str) -> Figure:
    """Experts that differ from the old policy's, by layer and update within a rollout; one map an arm."""
    key = "routing/flips_old_current_by_update"
    maps = {}
    for arm in study.arms:
        found = [_mean(run.series(key)[1]) for run in study.select(arm, condition) if run.series(key)[1].ndim == 3]
        found = [one for one in found if one.shape == found[0].shape]
        if found:
            maps[arm] = 100 * _mean(np.stack(found))
    figure, axes = panels(list(maps), columns=4, height=2.4)
    top = max(float(np.nanmax(one)) for one in maps.values()) or 1.0
    image = None
    for ax, one in zip(axes, maps.values(), strict=True):
        image = ax.imshow(one.T, aspect="auto", origin="lower", cmap="cividis", vmin=0, vmax=top, interpolation="none")
        ax.grid(False)
        ax.set_xlabel("update within the rollout", fontsize=8.5, color=INK)
        ax.set_ylabel("MoE layer", fontsize=8.5, color=INK)
        ax.set_yticks(range(one.shape[1]))
        updates = range(0, one.shape[0], -(-one.shape[0] // 8))
        ax.set_xticks(updates, [str(update + 1) for update in updates])
    if image is not None:
        bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.01)
        bar.set_label("% of experts changed", fontsize=8.5, color=INK)
        bar.ax.tick_params(labelsize=8.5)
    return figure


def outcome_by_condition(study: Study, measure: Callable[[Run], float], title: str) -> Figure:
    """One outcome against the conditions of the sweep: a dot a seed, a line through the means of each arm."""
    figure, (ax,) = panels([title], columns=1, height=3.4)
    ends = []
    for place, arm in enumerate(study.arms):
        ink, means = colour(study.arms, arm), []
        for x, condition in enumerate(study.conditions):
            values = np.array([measure(run) for run in study.select(arm, condition)], np.float64)
            jitter = 0.03 * (place - (len(study.arms) - 1) / 2)
            ax.plot(np.full(len(values), x + jitter), values, "o", color=ink, alpha=0.45, markersize=4)
            means.append((x + jitter, float(_mean(values)) if len(values) else float("nan")))
        ax.plot([x for x, _ in means], [y for _, y in means], color=ink, linewidth=2)
        finite = [(x, y) for x, y in means if np.isfinite(y)]
        if finite:
            ends.append((*finite[-1], arm, ink))
    ax.set_xticks(range(len(study.conditions)), study.conditions)
    label_ends(ax, ends)
    return figure


def _aligned(runs: Sequence[Run], key: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps that any run has, and values [run, step], NaN where a run lacks the step."""
    found = [run.series(key) for run in runs]
    found = [(steps, values) for steps, values in found if values.ndim == 1 and len(values)]
    steps = np.unique(np.concatenate([steps for steps, _ in found])) if found else np.zeros(0)
    values = np.full((len(found), len(steps)), np.nan)
    for row, (own, value) in zip(values, found, strict=True):
        row[np.searchsorted(steps, own)] = value
    return steps, values


def _quiet(reduce: Callable[..., np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    def over_first_axis(values: np.ndarray) -> np.ndarray:
        empty = ~np.any(np.isfinite(values), 0)
        return np.where(empty, np.nan, reduce(np.where(empty, 0, values), axis=0))

    return over_first_axis


_mean, _least, _most = _quiet(np.nanmean), _quiet(np.nanmin), _quiet(np.nanmax)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average over about a fifteenth of the run; NaN stays NaN and does not spread."""
    reach = max(len(values) // 30, 1)
    windows = [values[max(i - reach, 0) : i + reach + 1] for i in range(len(values))]
    means = np.array([np.nanmean(window) if np.any(np.isfinite(window)) else np.nan for window in windows])
    return np.where(np.isfinite(values), means, np.nan)


_LEARNING = (
    Curve("reward/mean", "training reward, all answers"),
    Curve("eval/greedy", "held-out, greedy"),
    Curve("eval/pass_at_1", "held-out, sampled"),
    Curve(CLIPPED, "tokens clipped", percent=True),
    Curve("routing/flips_old_current", "experts changed, old to current", percent=True),
    Curve("entropy", "entropy (nats per token)"),
    Curve("rollout/length_mean", "answer length (tokens)"),
    Curve("grad/norm", "gradient norm", scale="log"),
    Curve("rollout/tokens_per_s", "rollout tokens per second"),
)
_RATIOS = (
    Curve("ratio/token_var", "variance of the token ratio", scale="log"),
    Curve("ratio/sequence_var", "variance of the sequence ratio", scale="log"),
    Curve("ratio/ess", "effective sample size", percent=True),
    Curve("ratio/token_p99", "99th percentile of the token ratio"),
    Curve("kl/old", "KL to the old policy", scale="log"),
    Curve("kl/sampler", "KL between sampler and trainer", scale="log"),
)
_DECOMPOSITION = (
    Curve("routing/share_of_variance", "share of routing in Var(log ratio)", percent=True),
    Curve("routing/parameter_var", "variance of the parameter part", scale="log"),
    Curve("routing/routing_var", "variance of the routing part", scale="log"),
)
_WEIGHTS = (
    Curve("gradient_weight/positive", "gradient weight, advantage above 0"),
    Curve("gradient_weight/negative", "gradient weight, advantage below 0"),
    Curve("gate/mean", "mean gate of SAPO"),
)


def _plot(stem: str, heading: str, caption: str, panel: Sequence[Curve]) -> Plot:
    return Plot(stem, heading, caption, [one.key for one in panel], functools.partial(curves, panel=panel))


PLOTS: Sequence[Plot] = (
    _plot(
        "curves",
        "Learning curves",
        "Does the reward rise, and does it stay? Bold: mean over seeds, smoothed over about a fifteenth of the run; "
        "thin: not smoothed; band: lowest to highest seed. Training reward counts every generated answer.",
        _LEARNING,
    ),
    Plot(
        "survival",
        "Time to collapse",
        "A run has collapsed when its mean reward was below half of its running maximum for 5 rollouts in a row, or is "
        "not finite. A step down is a collapse, a tick a run that ended without one; the numbers count the survivors.",
        ["reward/mean"],
        survival_plot,
    ),
    Plot(
        "flips",
        "Experts changed by layer and update",
        "Share of the activated experts that the current policy no longer picks, averaged over rollouts and seeds. "
        "Brighter to the right: routing drifts within a rollout; a bright row: one layer does most of it.",
        ["routing/flips_old_current_by_update"],
        flip_map,
    ),
    _plot(
        "decomposition",
        "What moves the ratio",
        "Share of the variance of the log-ratio that comes from the changed selection of experts alone: "
        "Cov(routing part, log r) / Var(log r). Near 0 %: the parameters move the ratio; near 100 %: the routing does.",
        _DECOMPOSITION,
    ),
    Plot(
        "routing",
        "Routing, further numbers",
        "Between sampler and old policy experts differ by the engine alone (another shape, another dtype), between old "
        "and current policy by what training did.",
        ["routing/flips_sampler_old", "routing/flips_numeric"],
        other_routing,
    ),
    _plot(
        "ratios",
        "Importance ratios",
        "How far the policy strays from the one that sampled. A rising variance or 99th percentile, or a falling "
        "effective sample size, comes before trouble.",
        _RATIOS,
    ),
    _plot(
        "gradient_weights",
        "Effective gradient weight per token",
        "The factor that the objective leaves on a token's gradient (0 or the ratio for a clip, w(r) for a soft gate), "
        "by the sign of its advantage: the clip fraction that may be compared across objectives.",
        _WEIGHTS,
    ),
)
