"""The tables of a report: what each arm did, and how it differs from the baseline pair by pair."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.reporting.read import CLIPPED, Run, Study
from jaxrl_llm.reporting.statistics import PairedDifference, paired_difference

__all__ = ["OUTCOMES", "Outcome", "arm_table", "config_table", "difference_table", "differences", "verdicts"]


@dataclass(frozen=True)
class Outcome:
    """A number a run, compared pair by pair."""

    name: str
    measure: Callable[[Run], float]
    digits: int = 3


def _policy(key: str, **kwargs: int) -> Callable[[Run], float]:
    # A run that ended on a number that is not finite has no usable policy: it counts as reward 0, it is not left out.
    return lambda run: 0.0 if run.diverged and run.series(key)[0].size else run.average(key, **kwargs)


_TIME = Outcome("rollouts without collapse", lambda run: run.collapse()[0], digits=1)  # shown where a run collapsed
OUTCOMES: Sequence[Outcome] = (
    Outcome("held-out greedy, end", _policy("eval/greedy", last=1)),
    Outcome("held-out sampled, end", _policy("eval/pass_at_1", last=1)),
    Outcome("training reward, last 5", _policy("reward/mean", last=5)),
    _TIME,
)


def arm_table(study: Study, condition: str) -> tuple[list[str], list[list[str]]]:
    """One row an arm, means over its seeds; columns that no run has are left out."""
    columns: dict[str, Callable[[Sequence[Run]], str]] = {
        "held-out greedy": _change("eval/greedy"),
        "held-out sampled": _change("eval/pass_at_1"),
        "pass@k": lambda runs: _number([run.value("eval/pass_at_k") for run in runs], "{:.3f}"),
        "reward, last 5": lambda runs: _number([run.average("reward/mean", 5) for run in runs], "{:.3f}"),
        "clipped": lambda runs: _number([run.average(CLIPPED) for run in runs], "{:.2%}"),
        "experts changed": lambda runs: _number([run.average("routing/flips_old_current") for run in runs], "{:.2%}"),
        "tokens/s": lambda runs: _number([_median(run, "rollout/tokens_per_s") for run in runs], "{:,.0f}"),
        "collapsed": lambda runs: f"{sum(run.collapse()[1] for run in runs)}/{len(runs)}" if runs else "",
    }
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


def differences(study: Study, condition: str) -> Iterator[tuple[str, Outcome, PairedDifference]]:
    """Every arm against the baseline, in every outcome that some run has, over the pairs whose two runs have ended."""
    ended = {arm: {run.seed: run for run in study.select(arm, condition) if run.ended} for arm in study.arms}
    fell = any(run.collapse()[1] for runs in ended.values() for run in runs.values())
    for outcome in OUTCOMES if fell else [one for one in OUTCOMES if one is not _TIME]:
        for arm in study.arms[1:]:
            seeds = [seed for seed in ended[study.baseline] if seed in ended[arm]]
            ours, theirs = (
                np.array([outcome.measure(ended[name][seed]) for seed in seeds], np.float64)
                for name in (arm, study.baseline)
            )
            if np.any(np.isfinite(ours - theirs)):
                yield arm, outcome, paired_difference(ours, theirs)


def difference_table(study: Study, condition: str) -> tuple[list[str], list[list[str]]]:
    """Paired differences to the baseline with both intervals and a verdict."""
    header = ["outcome", "arm", "difference", "95 % paired t", "bootstrap", "pairs", "verdict"]
    rows = []
    for arm, outcome, d in differences(study, condition):
        interval, bootstrap = (
            f"[{low:+.{outcome.digits}f}, {high:+.{outcome.digits}f}]" if d.n > 1 else "none"
            for low, high in ((d.low, d.high), (d.bootstrap_low, d.bootstrap_high))
        )
        rows.append([outcome.name, arm, f"{d.mean:+.{outcome.digits}f}", interval, bootstrap, str(d.n), d.verdict])
    return header, rows


def verdicts(study: Study, condition: str) -> list[str]:
    """The difference table in sentences."""
    lines = []
    for arm, outcome, d in differences(study, condition):
        size = f"{d.mean:+.{outcome.digits}f}"
        if d.n > 1:
            size += f" [{d.low:+.{outcome.digits}f}, {d.high:+.{outcome.digits}f}]"
        words = {"higher": f"{arm} is higher", "lower": f"{arm} is lower"}.get(d.verdict, d.verdict)
        lines.append(f"{outcome.name}: {arm} against {study.baseline} {size} over {d.n} pairs: {words}.")
    return lines


def config_table(study: Study) -> tuple[list[str], list[list[str]]]:
    """The configuration fields in which arms or conditions differ: one row an arm and condition, one column a field."""
    cells = [(arm, condition) for condition in study.conditions for arm in study.arms]
    flat = {}
    for cell in cells:
        recorded = [run.record["config"] for run in study.select(*cell) if run.record.get("config")]
        if recorded:
            flat[cell] = dict(_flatten(recorded[0]))
    fields = sorted({field for one in flat.values() for field in one})
    varying = [f for f in fields if f.split(".")[-1] != "seed" and len({one.get(f) for one in flat.values()}) > 1]
    rows = [[", ".join(filter(None, cell)), *(one.get(field, "") for field in varying)] for cell, one in flat.items()]
    return ["arm", *varying], rows if varying else []


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _change(key: str) -> Callable[[Sequence[Run]], str]:
    def column(runs: Sequence[Run]) -> str:
        before = _number([run.value(key, at=0) for run in runs], "{:.3f}")
        after = _number([run.value(key) for run in runs], "{:.3f}")
        return f"{before} -> {after}" if before else ""

    return column


def _median(run: Run, key: str) -> float:
    values = run.series(key)[1]  # the first rollout compiles: a mean would tell of that
    return float(np.median(values)) if len(values) else float("nan")


def _number(values: Sequence[float], form: str) -> str:
    finite = [value for value in values if np.isfinite(value)]
    return form.format(np.mean(finite)) if finite else ""
