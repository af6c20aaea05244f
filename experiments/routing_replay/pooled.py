"""The pooled estimate of every comparison that has several batches, each batch with its power, and what stands.

A claim needs all three of: an interval of the pooled trajectories (or seeds) without zero after Holm's correction over
the table's comparisons; batches that do not disagree (p of one mean 0.05 or more); and at least two batches. Where they
disagree and each lies on the same side of zero, the sign stands and no size does. The rule that the sweeps were planned
by asked for an interval without zero in two batches instead, whatever their power: its word stands where it differs.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from experiments.routing_replay.branches import by_trajectory
from experiments.routing_replay.kept import CONTRASTS, LATER
from experiments.routing_replay.table_parts import SAMPLED, Table, gain, interval, mean
from jaxrl_llm.report.comparisons import compare, probability
from jaxrl_llm.report.read import Study
from jaxrl_llm.report.statistics import (
    LEVEL,
    PairedDifference,
    batches_differ,
    detectable,
    holm,
    paired_difference,
    seed_means,
)

CLIP = "GRPO clip 1e-08"
# The seeds from which `negatives` was run as a second part, and of `negatives_masked`, with its half.
NEGATIVES_HALF, MASKED, MASKED_HALF = 318, 360, 370
HEADER = [
    "n",
    "pooled difference",
    "detectable",
    "batches, each with its power for the pooled difference",
    "one mean, p",
    "corrected p",
    "stands",
    "by two batches",
]


@dataclass(frozen=True)
class Pooled:
    """One comparison: all of its trajectories (or seeds) as one sample, its batches, and p that they have one mean."""

    labels: Sequence[str]
    whole: PairedDifference
    batches: Mapping[str, PairedDifference]
    one_mean: float


def pooled(labels: Sequence[str], batches: Mapping[str, np.ndarray]) -> Pooled:
    """Pool the differences of each batch: one number a trajectory, which are independent and of equal weight."""
    every = np.concatenate(list(batches.values()))
    told = {name: _difference(own) for name, own in batches.items()}
    return Pooled(labels, _difference(every), told, batches_differ(list(batches.values())))


def _difference(values: np.ndarray) -> PairedDifference:
    return paired_difference(values, np.zeros_like(values), resamples=2)  # no table shows the bootstrap, which is slow


def stands(one: Pooled, p: float) -> str:
    """Claim, sign only, batches differ, estimate or no effect found; p: corrected for the number of comparisons."""
    if one.one_mean < 1 - LEVEL:
        sides = {_side(batch) for batch in one.batches.values()}
        return "sign only" if p < 1 - LEVEL and len(sides) == 1 and 0 not in sides else "batches differ"
    if not _side(one.whole):
        return "no effect found"
    return "claim" if p < 1 - LEVEL and len(one.batches) > 1 else "estimate"


def stood(one: Pooled) -> str:
    """The same by the rule of two batches: two intervals on one side of zero, and none on the other."""
    sides = [_side(batch) for batch in one.batches.values()]
    if abs(sum(sides)) >= 2 and abs(sum(sides)) == sum(map(abs, sides)):
        return "claim"
    return "estimate" if any(sides) or _side(one.whole) else "no effect found"


def _side(d: PairedDifference) -> int:
    """The side of zero on which the interval lies; 0: on both."""
    return (d.low > 0) - (d.high < 0)


def table(comparisons: Sequence[Pooled]) -> Table:
    """The labels of each comparison and the columns of HEADER."""
    rows = []
    corrected = holm([one.whole.p for one in comparisons])
    for one, p in zip(comparisons, corrected, strict=True):
        told = [_batch(name, batch, one.whole.mean) for name, batch in one.batches.items()]
        now, before = stands(one, p), stood(one)
        same_mean = f"{one.one_mean:.2g}" if np.isfinite(one.one_mean) else ""
        cells = [str(one.whole.n), interval(one.whole), f"{one.whole.detectable:.3f}", "; ".join(told)]
        rows.append([*one.labels, *cells, same_mean, probability(p), now, before if before != now else ""])
    return rows


def _batch(name: str, d: PairedDifference, effect: float) -> str:
    found = power(effect, d)
    return f"{name}: {interval(d)}" + (f", {100 * found:.0f} %" if np.isfinite(found) else "")


def power(effect: float, d: PairedDifference) -> float:
    """The chance that a sample as large and as spread as this one finds a true mean difference of `effect`.

        P(T > t_{(1 + LEVEL) / 2, n - 1}),   T noncentral t with n - 1 degrees, noncentrality |effect| / standard error

    "Finds" as in `detectable`. NaN where the sample has no spread to judge by.

    Source: Cohen, "Statistical power analysis for the behavioral sciences" (1988), section 2.3.
    """
    if d.n < 2 or not d.detectable > 0:
        return float("nan")
    error = d.detectable / detectable(d.n)
    return float(stats.nct.sf(stats.t.ppf((1 + LEVEL) / 2, d.n - 1), d.n - 1, abs(effect) / error))


def one_rollout(*studies: Study) -> list[Pooled]:
    """Every rate and arm to GRPO on the mixture, and GSPO to the clip of 1e-8: the sweeps are batches.

    Where one sweep alone has the arm, its two halves are; labels: rate, what a rollout of GRPO gains, arm.
    """
    sweeps = _of_mixture(*studies)
    halves = {"branch": 4, "tight": 16, "negatives": NEGATIVES_HALF, "negatives_masked": MASKED_HALF}
    found = []
    for rate in sorted({one for study in sweeps.values() for one in study.conditions}, key=lambda one: float(one[3:])):
        scale = _scale(sweeps.values(), rate)
        arms = dict.fromkeys(arm for study in sweeps.values() for arm in study.arms[1:] if study.select(arm, rate))
        for arm, baseline in [*((arm, "GRPO") for arm in arms), *([("GSPO", CLIP)] if CLIP in arms else [])]:
            named = f"{arm} minus {baseline}" if baseline != "GRPO" else arm
            found.append(pooled([rate, scale, named], _batches(sweeps, halves, arm, rate, baseline)))
    return found


def _of_mixture(
    branch: Study, tight: Study, precise: Study, confirm: Study, negatives: Study, masked: Study
) -> dict[str, Study]:
    """The sweeps of one rollout by name; of those by model the mixture's runs, whose conditions are then rates too."""

    def rates(study: Study) -> Study:
        model = "mixture, "
        runs = [
            dataclasses.replace(run, condition=run.condition.removeprefix(model))
            for run in study.runs
            if run.condition.startswith(model)
        ]
        return dataclasses.replace(study, runs=runs)

    found = {"branch": branch, "tight": tight, "precise": precise, "confirm": confirm}
    return {**found, "negatives": rates(negatives), "negatives_masked": rates(masked)}


def _batches(
    sweeps: Mapping[str, Study], halves: Mapping[str, int], arm: str, condition: str, baseline: str
) -> dict[str, np.ndarray]:
    having = {
        name: dataclasses.replace(study, baseline=baseline)
        for name, study in sweeps.items()
        if study.select(arm, condition) and study.select(baseline, condition)
    }
    name, *others = having
    if not others and name in halves:
        return _split(having[name], arm, condition, halves[name])
    return {f"`{name}`": np.array(by_trajectory(study, arm, condition)) for name, study in having.items()}


def _split(study: Study, arm: str, condition: str, *starts: int) -> dict[str, np.ndarray]:
    """The differences by batch, each of which but the first begins with one of these seeds."""
    ends = (*starts[1:], np.inf)
    parts = {f"seeds below {starts[0]}": (0, starts[0])}
    parts |= {f"seeds from {start}": (start, end) for start, end in zip(starts, ends, strict=True)}
    found = {name: np.array(by_trajectory(study, arm, condition, *part)) for name, part in parts.items()}
    return {name: own for name, own in found.items() if own.size}


def _scale(sweeps: Iterable[Study], condition: str) -> str:
    """The gain of GRPO's own branches there, over the trajectories of all sweeps."""
    runs = [[run for run in study.select("GRPO", condition) if run.ended] for study in sweeps]
    gains = [seed_means([gain(run) for run in own], [run.seed for run in own]) for own in runs]
    return interval(_difference(np.concatenate(gains)))


def several_rollouts(study: Study, second: int) -> list[Pooled]:
    """Every condition and arm of a sweep of branches whose second batch begins with that seed.

    Labels: condition, what GRPO's branches gain, arm.
    """
    return [
        pooled([condition, _scale([study], condition), arm], _split(study, arm, condition, second))
        for condition in study.conditions
        for arm in study.arms[1:]
    ]


def by_sign(study: Study, starts: Callable[[int], Sequence[int]]) -> list[Pooled]:
    """Every arm of `negatives` or its whole runs to GRPO, and its contrasts; labels: condition, what GRPO gains, arms.

    starts: the last seed of a condition -> the seeds with which its later batches begin.
    """
    found = []
    for condition in study.conditions:
        scale = _scale([study], condition)
        later = starts(max(int(run.seed) for run in study.select("GRPO", condition)))
        for arm, baseline in [*((arm, "GRPO") for arm in study.arms[1:]), *CONTRASTS]:
            if not (study.select(arm, condition) and study.select(baseline, condition)):
                continue
            batches = _split(dataclasses.replace(study, baseline=baseline), arm, condition, *later)
            found.append(pooled([condition, scale, f"{arm} minus {baseline}"], batches))
    return found


def negatives(study: Study, masked: Study) -> list[Pooled]:
    """Rows of sweeps by model that `one_rollout` does not pool: the dense model, and on the mixture arms against each
    other."""
    both = dataclasses.replace(study, runs=[*study.runs, *masked.runs])
    found = by_sign(both, lambda last: (NEGATIVES_HALF, MASKED, MASKED_HALF))
    there = (" minus GRPO", f"GSPO minus {CLIP}")
    return [one for one in found if not (one.labels[0].startswith("mixture") and one.labels[2].endswith(there))]


def whole_runs(study: Study, again: Study) -> list[Pooled]:
    """Every arm in held-out accuracy and reward at the end, with the commits as batches; and GSPO in the accuracy with
    the runs of `negatives_runs` in that setting and their second batch."""
    found = [
        Pooled(
            [c.outcome.name, c.arm], c.difference, {f"`{commit}`": batch for commit, batch in c.batches}, c.batches_p
        )
        for c in compare(study, "")
        if c.outcome.name != "rollouts without collapse"
    ]
    same = "sorting, mixture, N = 32, lr 0.0004"
    batches = {"`seeds`": np.array(by_trajectory(study, "GSPO", "")), **_split(again, "GSPO", same, LATER)}
    return [*found, pooled([SAMPLED.name, "GSPO, with `negatives_runs`"], batches)]


def gradient_kept(*studies: Study) -> Table:
    """Rate, arm, the share of the gradient kept of A > 0 and of A < 0, and the pooled difference to GRPO."""
    found, sweeps = one_rollout(*studies), _of_mixture(*studies).values()
    rows = []
    for rate in dict.fromkeys(one.labels[0] for one in found):
        own = {one.labels[2]: interval(one.whole) for one in found if one.labels[0] == rate}
        for arm in dict.fromkeys(arm for study in sweeps for arm in study.arms):
            runs = [run for study in sweeps for run in study.select(arm, rate)]
            if runs:
                kept = [f"{mean(runs, f'gradient_weight/{sign}'):.2f}" for sign in ("positive", "negative")]
                rows.append([rate, arm, *kept, own.get(arm, "")])
    return rows
