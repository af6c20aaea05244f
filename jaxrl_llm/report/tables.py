"""The descriptive tables of a report: what each arm did, and its configuration."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import objectives
from jaxrl_llm.report.comparisons import OUTCOMES
from jaxrl_llm.report.read import CLIPPED, Run, Study

__all__ = ["arm_table", "config_table", "resolved", "routing_table"]


def arm_table(study: Study, condition: str) -> tuple[list[str], list[list[str]]]:
    """One row an arm, means over its seeds; columns that no run has are left out.

    The end of a run (held-out rewards, pass@k, the last rewards) is a mean over the runs that have ended: the newest
    evaluation of a run that goes on, or stopped, is no outcome. A run that diverged counts as in `OUTCOMES`.
    """
    greedy, sampled, last_rewards, pairs = (outcome.measure for outcome in OUTCOMES[:4])
    columns: dict[str, Callable[[Sequence[Run]], str]] = {
        "held-out greedy": _change("eval/greedy", greedy),
        "held-out sampled": _change("eval/pass_at_1", sampled),
        "held-out pairs": _change("eval/pair_accuracy", pairs),
        "pass@k": lambda runs: _number([run.value("eval/pass_at_k") for run in runs if run.ended], "{:.3f}"),
        "reward, last 5": lambda runs: _number([last_rewards(run) for run in runs if run.ended], "{:.3f}"),
        "clipped": lambda runs: _number([run.average(CLIPPED) for run in runs], "{:.2%}"),
        "experts changed": lambda runs: _number([run.average("routing/flips_old_current") for run in runs], "{:.2%}"),
        "tokens/s": lambda runs: _number([_median(run, "rollout/tokens_per_s") for run in runs], "{:,.0f}"),
        "collapsed": _collapsed,
    }
    if study.branching:  # a branch is too short to collapse
        del columns["collapsed"]
    rows = []
    for arm in study.arms:
        planned = study.select(arm, condition)
        started = [run for run in planned if run.rows]
        if planned:
            done = f"{sum(run.finished for run in planned)}/{len(planned)}"
            rows.append([arm, done, *(column(started) for column in columns.values())])
    header = ["arm", "runs", *columns]
    kept = [i for i in range(len(header)) if i < 2 or any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _collapsed(runs: Sequence[Run]) -> str:
    ends = [run.collapse() for run in runs]
    sampled = [fell for time, fell in ends if np.isfinite(time)]
    return f"{sum(sampled)}/{len(sampled)}" if sampled else ""


def routing_table(study: Study, condition: str) -> tuple[list[str], list[list[str]]]:
    """What the changed selection of experts explains of Var(log r), over all measurements of an arm; empty if none.

    The share is weighted by the variance of each measurement, sum Cov(routing part, log r) / sum Var(log r), because a
    mean of ratios with a small denominator is heavy-tailed; the median and the 10th and 90th percentile of the single
    shares are reported beside it. The tails are shares of answer tokens.
    """
    header = [
        "arm",
        "measured",
        "routing share, by variance",
        "both orders",
        "median",
        "10 % to 90 %",
        "Var(log r)",
        "|routing part| > 0.2",
        "> ln 2",
    ]
    rows = []
    for arm in study.arms:
        runs = [run for run in study.select(arm, condition) if run.rows]

        measured = [row for run in runs for row in run.rows if "routing/log_ratio_var" in row]

        def values(key: str, measured: Sequence[Mapping[str, Any]] = measured) -> np.ndarray:
            return np.array([row.get(f"routing/{key}") for row in measured], np.float64)  # absent: NaN

        variance, share, both = (values(key) for key in ("log_ratio_var", "share_of_variance", _SHAPLEY))
        known = np.isfinite(variance) & np.isfinite(share) & (variance > 0)
        if not known.any():
            continue
        variance, share, both = variance[known], share[known], both[known]
        low, middle, high = np.quantile(share, [0.1, 0.5, 0.9])
        tails = [values(f"part_above_{bound}") for bound in ("0.2", "ln2")]
        both_orders = np.average(both, weights=variance)
        rows.append(
            [
                arm,
                str(len(share)),
                f"{np.average(share, weights=variance):.1%}",
                f"{both_orders:.1%}" if np.isfinite(both_orders) else "",
                f"{middle:.1%}",
                f"{low:.1%} to {high:.1%}",
                f"{variance.mean():.2g}",
                *(_number(tail.tolist(), "{:.3%}") for tail in tails),
            ]
        )
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


_SHAPLEY = "share_of_variance_shapley"


def config_table(study: Study) -> tuple[list[str], list[list[str]]]:
    """The configuration fields in which arms or conditions differ: one row an arm and condition, one column a field."""
    cells = [(arm, condition) for condition in study.conditions for arm in study.arms]
    flat = {}
    for cell in cells:
        recorded = [run.record["config"] for run in study.select(*cell) if run.record.get("config")]
        if recorded:
            flat[cell] = dict(_flatten(resolved(recorded[0])))
    fields = sorted({field for one in flat.values() for field in one})
    varying = [f for f in fields if f.split(".")[-1] != "seed" and len({one.get(f) for one in flat.values()}) > 1]
    rows = [[", ".join(filter(None, cell)), *(one.get(field, "") for field in varying)] for cell, one in flat.items()]
    return ["arm", *varying], rows if varying else []


def resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the resolved hyper-parameters of its objective: the recipe's default for None.

    Fields that the recipe does not have are left out; for an unknown recipe the fields that were set are kept.
    """
    raw = dict(config.get("objective") or {})
    given = {key: value for key, value in raw.items() if value is not None}
    try:
        defaults = objectives.hyperparameters(str(given.get("name")), given.get("aggregation"))
    except ValueError:
        defaults = {}
    known = {key: value for key, value in defaults.items() if value is not None}
    return {**config, "objective": {**known, **given}} if raw else dict(config)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _change(key: str, end: Callable[[Run], float]) -> Callable[[Sequence[Run]], str]:
    def column(runs: Sequence[Run]) -> str:
        ended = [run for run in runs if run.ended]
        before = _number([run.value(key, at=0) for run in ended or runs], "{:.3f}")
        after = _number([end(run) for run in ended], "{:.3f}")
        return f"{before} -> {after or 'not ended'}" if before else ""

    return column


def _median(run: Run, key: str) -> float:
    values = run.series(key)[1]  # the first rollout compiles, which would distort a mean
    return float(np.median(values)) if len(values) else float("nan")


def _number(values: Sequence[float], form: str) -> str:
    finite = [value for value in values if np.isfinite(value)]
    return form.format(np.mean(finite)) if finite else ""
