"""The figures of a report: each takes a study and one of its conditions; PLOTS lists them with what they need."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from jaxrl_llm.reporting.curves import Curve, curves, mean
from jaxrl_llm.reporting.layer_maps import FLIPS, LOAD, flip_map, load_map
from jaxrl_llm.reporting.read import CLIPPED, Run, Study
from jaxrl_llm.reporting.statistics import survival
from jaxrl_llm.reporting.style import INK, colour, label_ends, panels

__all__ = ["PLOTS", "Plot", "other_routing", "outcome_by_condition", "survival_plot"]


@dataclass(frozen=True)
class Plot:
    """A figure of the page: file stem, heading, what to see in it, the keys that it needs, and how it is drawn."""

    stem: str
    heading: str
    caption: str
    needs: Sequence[str]
    draw: Callable[[Study, str], Figure]


def other_routing(study: Study, condition: str) -> Figure:
    """Every number under routing/ that no other figure shows, one panel each."""
    rows = [row for run in study.runs if run.condition == condition for row in run.rows]
    keys = {key for row in rows for key, value in row.items() if key.startswith("routing/") and np.ndim(value) == 0}
    shown = {key for curve in (*_LEARNING, *_DECOMPOSITION, *_FLIPPED) for key in curve.keys}
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
            means.append((x + jitter, float(mean(values)) if len(values) else float("nan")))
        ax.plot([x for x, _ in means], [y for _, y in means], color=ink, linewidth=2)
        finite = [(x, y) for x, y in means if np.isfinite(y)]
        if finite:
            ends.append((*finite[-1], arm, ink))
    ax.set_xticks(range(len(study.conditions)), study.conditions)
    label_ends(ax, ends)
    return figure


def _beside_unflipped(measure: str, title: str, scale: str = "linear") -> Curve:
    flipped, unflipped = f"routing/ratio_flipped_{measure}", f"routing/ratio_unflipped_{measure}"
    return Curve(flipped, title, scale, beside=unflipped, names=("after a changed expert", "before any"))


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
_FLIPPED = (
    Curve("routing/flipped_tokens", "tokens after a changed expert", percent=True),
    _beside_unflipped("mean", "mean of the token ratio"),
    _beside_unflipped("var", "variance of the token ratio", scale="log"),
    _beside_unflipped("p99", "99th percentile of the ratio", scale="log"),
    _beside_unflipped("max", "maximum of the ratio", scale="log"),
)
_WEIGHTS = (
    Curve("gradient_weight/positive", "gradient weight, advantage above 0"),
    Curve("gradient_weight/negative", "gradient weight, advantage below 0"),
    Curve("gate/mean", "mean gate of SAPO"),
)


def _plot(stem: str, heading: str, caption: str, panel: Sequence[Curve]) -> Plot:
    return Plot(
        stem, heading, caption, [key for one in panel for key in one.keys], functools.partial(curves, panel=panel)
    )


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
        [FLIPS],
        flip_map,
    ),
    Plot(
        "load",
        "Expert load by layer",
        "Tokens of the busiest expert as a multiple of an even share, averaged over seeds: 1 is even, the number of "
        "experts over top-k means that every token goes there. A row that brightens: its tokens crowd onto few "
        "experts.",
        [LOAD],
        load_map,
    ),
    _plot(
        "decomposition",
        "What moves the ratio",
        "Share of the variance of the log-ratio that comes from the changed selection of experts alone: "
        "Cov(routing part, log r) / Var(log r). Near 0 %: the parameters move the ratio; near 100 %: the routing does.",
        _DECOMPOSITION,
    ),
    _plot(
        "flipped",
        "Token ratios with and without a changed expert",
        "Solid: tokens that follow a changed expert, at any earlier position and in any layer, since attention carries "
        "the change on; dashed: tokens before any. Solid above dashed: ratios stray further where experts changed, "
        "though moved parameters may have caused both. A line is missing where an arm has no such token.",
        _FLIPPED,
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
