"""The tables of a report: what each arm did, how it differs from the baseline, and its configuration.

Every table is a header and its rows; without rows there is nothing to show.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import objectives
from jaxrl_llm.config import loading
from jaxrl_llm.report.comparisons import OUTCOMES, Comparison, compare, probability
from jaxrl_llm.report.read import CLIPPED, Run, Study
from jaxrl_llm.report.statistics import PairedDifference, half_width, seed_means

Table = tuple[list[str], list[list[str]]]


def arm_table(study: Study, condition: str) -> Table:
    """One row an arm, means over its seeds +- half of their t intervals; columns that no run has are left out.

    The newest evaluation of an unfinished run is no outcome: the end of a run (held-out rewards, pass@k, the last
    rewards) is a mean over the runs that have ended. A run that diverged counts as in `OUTCOMES`.
    """
    greedy, sampled, last_rewards, pairs = OUTCOMES[:4]
    columns: dict[str, Callable[[Sequence[Run]], str]] = {
        study.named("eval/greedy"): _change("eval/greedy", greedy.measure),
        study.named("eval/pass_at_1"): _change("eval/pass_at_1", sampled.measure),
        study.named("eval/pair_accuracy"): _change("eval/pair_accuracy", pairs.measure),
        study.named("eval/pass_at_k"): lambda runs: _mean(_ended(runs), lambda run: run.value("eval/pass_at_k")),
        last_rewards.title: lambda runs: _mean(_ended(runs), last_rewards.measure),
        study.named(CLIPPED): lambda runs: _mean(runs, lambda run: run.average(CLIPPED), "{:.2%}"),
        "experts changed": lambda runs: _mean(runs, lambda run: run.average("routing/flips_old_current"), "{:.2%}"),
        "tokens/s": lambda runs: _mean(runs, lambda run: _median(run, "rollout/tokens_per_s"), "{:,.0f}"),
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
    return _without_empty(["arm", "runs", *columns], rows)


def _collapsed(runs: Sequence[Run]) -> str:
    ends = [run.collapse() for run in runs]
    sampled = [fell for time, fell in ends if np.isfinite(time)]
    return f"{sum(sampled)}/{len(sampled)}" if sampled else ""


def difference_table(study: Study, condition: str) -> Table:
    """Paired differences with intervals, detectable difference and verdict; arms with one seed are left out."""
    header = ["difference", "95 % t interval", "bootstrap", "p (Holm)", "detectable", "seeds", "verdict"]
    rows = []
    for c in compare(study, condition):
        d, outcome = c.difference, c.outcome
        if d.n > 1:
            intervals = [outcome.interval(d.low, d.high), outcome.interval(d.bootstrap_low, d.bootstrap_high)]
            detectable = "" if d.identical else f"{d.detectable:.{outcome.digits}f}"
            seeds = str(d.n) if d.n == d.pairs else f"{d.n} ({d.pairs} pairs)"
            cells = [outcome.title, c.arm, outcome.signed(d.mean), *intervals]
            rows.append([*cells, probability(c.p), detectable, seeds, c.verdict])
    return ["outcome", "arm", *header], rows


def batch_table(study: Study, condition: str) -> Table:
    """The same differences by commit: difference, interval and (seeds) in a column each; empty if there is only one."""
    compared = [c for c in compare(study, condition) if c.batches]
    names = list(dict.fromkeys(name for c in compared for name, _ in c.batches))

    def cell(c: Comparison, d: PairedDifference) -> str:
        interval = f" {c.outcome.interval(d.low, d.high)}" if d.n > 1 else ""
        return f"{c.outcome.signed(d.mean)}{interval} ({d.n})"

    rows = []
    for c in compared:
        cells = {name: cell(c, d) for name, d in c.batches}
        rows.append([c.outcome.title, c.arm, *(cells.get(name, "") for name in names), probability(c.batches_p)])
    return ["outcome", "arm", *names, "one mean (p)"], rows


def routing_table(study: Study, condition: str) -> Table:
    """Return the share of Var(log r) that changed experts explain, over all measurements of an arm; empty if none.

    The share is weighted by the variance of each measurement, sum Cov(routing part, log r) / sum Var(log r), because
    ratios with a small denominator make a plain mean heavy-tailed. The tails are shares of answer tokens.
    """
    header = ["arm", "measured", "routing share, by variance", "both orders", "median", "10 % to 90 %", "Var(log r)"]
    names = ("log_ratio_var", "share_of_variance", "share_of_variance_shapley", "part_above_0.2", "part_above_ln2")
    keys = [f"routing/{name}" for name in names]
    rows = []
    for arm in study.arms:
        logged = [row for run in study.select(arm, condition) for row in run.rows if keys[0] in row]
        measured = np.array([[row.get(key) for key in keys] for row in logged], np.float64).reshape(-1, len(keys))
        variance, share = measured[:, 0], measured[:, 1]
        known = np.isfinite(variance) & np.isfinite(share) & (variance > 0)
        if not known.any():
            continue
        variance, share, both = measured[known, :3].T
        low, middle, high = np.quantile(share, [0.1, 0.5, 0.9])
        weighted = [_number([np.average(one, weights=variance)], "{:.1%}") for one in (share, both)]
        spread = [f"{middle:.1%}", f"{low:.1%} to {high:.1%}", f"{variance.mean():.2g}"]
        tails = [_number(tail, "{:.3%}") for tail in measured[:, 3:].T]
        rows.append([arm, str(len(share)), *weighted, *spread, *tails])
    return _without_empty([*header, "|routing part| > 0.2", "> ln 2"], rows)


def config_table(study: Study) -> Table:
    """The configuration fields in which arms or conditions differ: one row an arm and condition, one column a field."""
    flat = {}
    for cell in [(arm, condition) for condition in study.conditions for arm in study.arms]:
        recorded = [run.record for run in study.select(*cell) if run.record.get("config")]
        if recorded:
            flat[cell] = {field: str(value) for field, value in loading.flat(resolved(recorded[0])).items()}
    fields = sorted({field for one in flat.values() for field in one})
    seeds = any(len(study.select(*cell)) > 1 for cell in flat)  # of which the first run's alone is not the arm's
    varying = [f for f in fields if len({one.get(f) for one in flat.values()}) > 1]
    varying = [f for f in varying if f.split(".")[-1] != "seed" or not seeds]
    rows = [[", ".join(filter(None, cell)), *(one.get(field, "") for field in varying)] for cell, one in flat.items()]
    return ["arm", *varying], rows if varying else []


def resolved(record: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a config.json with the hyper-parameters that its objective had.

    Older records do not name them: there a field that is None has the recipe's default. Fields that the recipe does not
    have are left out; of an unknown recipe only the fields that were set are kept.
    """
    config = record.get("config", {})
    if isinstance(record.get("objective"), Mapping):
        return {**config, "objective": record["objective"]}
    raw = config.get("objective")
    if not raw or not isinstance(raw, Mapping):
        return dict(config)
    given = {key: value for key, value in raw.items() if value is not None}
    try:
        defaults = objectives.hyperparameters(str(given.get("name")), given.get("aggregation"), given.get("advantage"))
    except (ValueError, TypeError):  # an unknown recipe, or a field of another kind
        defaults = {}
    known = {key: value for key, value in defaults.items() if value is not None}
    return {**config, "objective": {**known, **given}}


def _change(key: str, end: Callable[[Run], float]) -> Callable[[Sequence[Run]], str]:
    def column(runs: Sequence[Run]) -> str:
        ended = _ended(runs)
        before = _mean(ended or runs, lambda run: run.value(key, at=0))
        after = _mean(ended, end)
        return f"{before} -> {after or 'not ended'}" if before else ""

    return column


def _ended(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.ended]


def _mean(runs: Sequence[Run], measure: Callable[[Run], float], form: str = "{:.3f}") -> str:
    """The mean over the runs +- half of its t interval over seeds, where there are two seeds or more."""
    measured = [(run.seed, measure(run)) for run in runs]
    values = [value for _, value in measured if np.isfinite(value)]
    half = float(half_width(seed_means(values, [seed for seed, value in measured if np.isfinite(value)])))
    return _number(values, form) + (f" ± {form.format(half)}" if np.isfinite(half) else "")


def _median(run: Run, key: str) -> float:
    values = run.series(key)[1]  # the first rollout compiles, which would distort a mean
    return float(np.median(values)) if len(values) else float("nan")


def _number(values: Sequence[float] | np.ndarray, form: str) -> str:
    finite = [value for value in values if np.isfinite(value)]
    return form.format(np.mean(finite)) if finite else ""


def _without_empty(header: list[str], rows: list[list[str]]) -> Table:
    """The table without the columns that are empty in every row."""
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]
