"""The figures of a report in the order of the page: PLOTS has the text of each, and how it is drawn for a condition."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from jaxrl_llm.report import diagnostic_figures as diagnostic
from jaxrl_llm.report.curves import Curve, curves
from jaxrl_llm.report.outcome_figures import forest_plot, no_pairs, nothing_fell, survival_plot
from jaxrl_llm.report.read import CLIPPED, Study


@dataclass(frozen=True)
class Plot:
    """A figure of the page, with its file's stem, the texts around it, and what it shows of a condition of a study."""

    stem: str
    heading: str
    caption: str
    draw: Callable[[Study, str], Figure]
    left_out: Callable[[Study, str], Sequence[str]]  # the parts that would be empty, each with its reason
    parts: int = 1  # it is drawn if fewer are left out
    key: str = ""  # it concerns only runs that log this metric; "": all runs


def _beside_unflipped(measure: str, title: str, scale: str = "linear") -> Curve:
    flipped, unflipped = f"routing/ratio_flipped_{measure}", f"routing/ratio_unflipped_{measure}"
    return Curve(flipped, title, scale, beside=unflipped, names=("after a changed expert", "before any"))


def _two_sides(key: str, title: str) -> Curve:
    return Curve(f"{key}_chosen", title, beside=f"{key}_rejected", names=("chosen", "rejected"))


_LEARNING = (
    Curve("reward/mean"),
    Curve("eval/greedy"),
    Curve("eval/pass_at_1"),
    Curve("eval/pass_at_k"),
    Curve(CLIPPED, percent=True),
    Curve("routing/flips_old_current", percent=True),
    Curve("entropy"),
    Curve("rollout/length_mean"),
    Curve("grad/norm", scale="log"),
    Curve("value/explained_variance"),
    Curve("rollout/tokens_per_s"),
)
_RATIOS = (
    Curve("ratio/token_var", scale="log"),
    Curve("ratio/sequence_var", scale="log"),
    Curve("ratio/ess", percent=True),
    Curve("ratio/token_p99"),
    Curve("kl/old", scale="log"),
    Curve("kl/sampler", scale="log"),
)
_DECOMPOSITION = (
    Curve("routing/share_of_variance", percent=True),
    Curve("routing/share_of_variance_shapley", percent=True),
    Curve("routing/log_ratio_var", scale="log"),
    Curve("routing/parameter_var", scale="log"),
    Curve("routing/routing_var", scale="log"),
)
_FLIPPED = (
    Curve("routing/flipped_tokens", percent=True),
    _beside_unflipped("mean", "mean of the token ratio"),
    _beside_unflipped("var", "variance of the token ratio", scale="log"),
    _beside_unflipped("p99", "99th percentile of the ratio", scale="log"),
    _beside_unflipped("max", "maximum of the ratio", scale="log"),
)
_WEIGHTS = (
    Curve("gradient_weight/positive"),
    Curve("gradient_weight/negative"),
    Curve("gate/mean"),
)
_PAIRS = (
    Curve("pairs/accuracy", percent=True),
    Curve("eval/pair_accuracy", percent=True),
    Curve("eval/brier"),
    Curve("eval/pair_margin"),
    _two_sides("eval/reward", "rewards, held-out"),
    _two_sides("eval/logprob", "log-probabilities of answers, held-out"),
)
PANELS = (*_LEARNING, *_PAIRS, *_RATIOS, *_DECOMPOSITION, *_FLIPPED, *_WEIGHTS)


def _other_routing(study: Study, condition: str) -> list[Curve]:
    """Every number under routing/ that no other figure shows."""
    logged = [item for run in study.runs if run.condition == condition for row in run.rows for item in row.items()]
    keys = {key for key, value in logged if key.startswith("routing/") and np.ndim(value) == 0}
    shown = {key for curve in (*_LEARNING, *_DECOMPOSITION, *_FLIPPED) for key in curve.keys}
    return [Curve(key, percent="flips" in key) for key in sorted(keys - shown)]


def _absent(study: Study, condition: str, panel: Sequence[Curve]) -> list[str]:
    reasons = [(curve.titled(study), curve.absent(study, condition)) for curve in panel]
    return [f"{title} ({reason})" for title, reason in reasons if reason]


def _no_other(study: Study, condition: str) -> list[str]:
    panel = _other_routing(study, condition)
    absent = _absent(study, condition, panel)
    return [f"further routing numbers ({'; '.join(absent) or 'not logged'})"] if len(absent) == len(panel) else []


def _plot(stem: str, heading: str, caption: str, panel: Sequence[Curve], key: str = "") -> Plot:
    draw, absent = functools.partial(curves, panel=panel), functools.partial(_absent, panel=panel)
    return Plot(stem, heading, caption, draw, absent, len(panel), key)


def _map(stem: str, heading: str, caption: str, draw: Callable[[Study, str], Figure], key: str) -> Plot:
    panel = [Curve(key, heading.lower(), percent=key == diagnostic.FLIPS)]
    return Plot(stem, heading, caption, draw, functools.partial(_absent, panel=panel))


PLOTS: Sequence[Plot] = (
    Plot(
        "differences",
        "Paired differences",
        "Mean difference to the baseline over pairs of one seed with its 95 % t interval, not corrected for the number "
        "of arms. Filled: all seeds. Hollow, where runs were made at several commits: each apart, with its seeds.",
        forest_plot,
        no_pairs,
    ),
    _plot(
        "curves",
        "Learning curves",
        "Does the reward rise, and does it stay? Bold: mean over seeds, smoothed over about a fifteenth of the run; "
        "thin: not smoothed; whiskers: 95 % t interval of it, of two seeds from one to the other. Mean reward is "
        "that of every training answer.",
        _LEARNING,
    ),
    _plot(
        "pairs",
        "Pairs of answers",
        "Rewards of the objective: the head's output, or beta times the score of the policy. A margin that grows while "
        "the held-out accuracy does not is over-fitting; chosen answers whose log-probability falls with that of the "
        "rejected ones are becoming rarer too.",
        _PAIRS,
        key="pairs/accuracy",
    ),
    Plot(
        "reliability",
        "Reliability",
        "Held-out pairs in bins of the probability that the model gives to its own order: on the dashed line it is "
        "calibrated, below it believes too much. Read at the last evaluation, seeds counted together.",
        diagnostic.reliability_plot,
        diagnostic.no_reliability,
        key="pairs/accuracy",
    ),
    Plot(
        "reward_against_kl",
        "A learnt reward against the verifier",
        "What the reward model says and what the verifier says, against the distance from the start. Both rise: the "
        "model is worth following; the left rises while the right falls: it is being exploited.",
        diagnostic.reward_against_kl,
        diagnostic.no_learnt_reward,
        key="reward/reward_model",
    ),
    Plot(
        "survival",
        "Time to collapse",
        "A run has collapsed when its mean reward was below half of the highest mean of 5 in a row for 5 rollouts in a "
        "row, or is not finite. A step down is a collapse, a tick a run that ended without one; the numbers count the "
        "survivors.",
        survival_plot,
        nothing_fell,
    ),
    _map(
        "flips",
        "Experts changed by layer and update",
        "Share of the activated experts that the current policy no longer picks, averaged over rollouts and seeds. "
        "Brighter to the right: routing drifts within a rollout; a bright row: one layer does most of it.",
        diagnostic.flip_map,
        diagnostic.FLIPS,
    ),
    _map(
        "load",
        "Expert load by layer",
        "Tokens of the busiest expert as a multiple of an even share, averaged over seeds: 1 is even, the number of "
        "experts over top-k means that every token goes there. A row that brightens: its tokens crowd onto few "
        "experts.",
        diagnostic.load_map,
        diagnostic.LOAD,
    ),
    _plot(
        "decomposition",
        "What moves the ratio",
        "Share of the variance of the log-ratio that comes from the changed selection of experts alone: "
        "Cov(routing part, log r) / Var(log r). Near 0 %: the parameters move the ratio; near 100 %: the routing does. "
        "Parameters first: routing is what remains once the parameters have moved; the mean of both orders (Shapley) "
        "favours neither. Every point is one measurement of a heavy-tailed ratio: the table weighs them by variance.",
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
        lambda study, condition: curves(study, condition, _other_routing(study, condition)),
        _no_other,
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
