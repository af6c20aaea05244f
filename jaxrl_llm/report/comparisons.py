"""How every arm differs from the baseline in every outcome, and in words."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from jaxrl_llm.report.names import in_words
from jaxrl_llm.report.read import Run, Study
from jaxrl_llm.report.statistics import PairedDifference, batches_differ, holm, paired_difference, seed_means, verdict


@dataclass(frozen=True)
class Outcome:
    """One number of every run, compared pair by pair: a short name for programs, and a title for readers."""

    name: str
    title: str
    measure: Callable[[Run], float]
    digits: int = 3

    def signed(self, value: float) -> str:
        return f"{value:+.{self.digits}f}"

    def interval(self, low: float, high: float) -> str:
        return f"[{self.signed(low)}, {self.signed(high)}]"


def _policy(key: str, **kwargs: int) -> Callable[[Run], float]:
    # A diverged run has no usable policy. It counts with reward 0: leaving it out would flatter its arm.
    return lambda run: 0.0 if run.diverged and run.series(key)[0].size else run.average(key, **kwargs)


def _last(name: str, key: str, rollouts: int = 0) -> Outcome:
    """The newest value, or the mean over the last rollouts."""
    title = f"{in_words(key)}, last {rollouts}" if rollouts else f"{in_words(key)}, end"
    return Outcome(name, title, _policy(key, last=rollouts or 1))


_REWARD = _last("training reward, last 5", "reward/mean", 5)
_WHOLE = "rollouts without collapse"
_TIME = Outcome(_WHOLE, _WHOLE, lambda run: run.collapse()[0], digits=1)  # shown where a run collapsed
OUTCOMES: Sequence[Outcome] = (
    _last("held-out greedy, end", "eval/greedy"),
    _last("held-out sampled, end", "eval/pass_at_1"),
    _REWARD,
    _last("held-out pairs, end", "eval/pair_accuracy"),
    _TIME,
)


@dataclass(frozen=True)
class Comparison:
    """One arm against the baseline in one outcome."""

    arm: str
    outcome: Outcome
    difference: PairedDifference
    p: float  # with Holm's correction over the arms that have enough seeds for a verdict in this outcome
    batches: Sequence[tuple[str, PairedDifference]]  # (commit, difference of its pairs); empty for a single commit
    batches_p: float  # p-value of the hypothesis that the batches have one mean

    @property
    def verdict(self) -> str:
        return verdict(self.difference, self.p)


def compare(study: Study, condition: str) -> list[Comparison]:
    """Every arm against the baseline, in every outcome that some run has, over the pairs whose two runs have ended.

    A pair is two runs of one seed (and of one branch, where runs branch off a trajectory). Branches have no training
    reward of their own: all arms share the first rollout of their state.
    """
    ended = {
        arm: {(run.seed, run.branch): run for run in study.select(arm, condition) if run.ended} for arm in study.arms
    }
    fell = any(run.collapse()[1] for runs in ended.values() for run in runs.values())
    skipped = [_REWARD, _TIME] if study.branching else [] if fell else [_TIME]
    compared = []
    for outcome in [one for one in OUTCOMES if one not in skipped]:
        rows = [_uncorrected(arm, outcome, ended[arm], ended[study.baseline]) for arm in study.arms[1:]]
        rows = [c for c in rows if c.difference.n]
        corrected = holm([c.p if verdict(c.difference, 1.0) == "undecided" else float("nan") for c in rows])
        compared += [replace(c, p=float(p)) for c, p in zip(rows, corrected, strict=True)]
    return compared


_Pair = tuple[str, str]  # seed, branch


def _uncorrected(arm: str, outcome: Outcome, ours: dict[_Pair, Run], theirs: dict[_Pair, Run]) -> Comparison:
    both = [pair for pair in theirs if pair in ours]
    measured = {pair: outcome.measure(ours[pair]) - outcome.measure(theirs[pair]) for pair in both}
    measured = {pair: difference for pair, difference in measured.items() if np.isfinite(difference)}
    commits: dict[str, list[_Pair]] = {}
    for pair in measured:
        commits.setdefault(ours[pair].batch, []).append(pair)

    def over(pairs: Collection[_Pair]) -> PairedDifference:
        return paired_difference([measured[pair] for pair in pairs], np.zeros(len(pairs)), [seed for seed, _ in pairs])

    means = [seed_means([measured[pair] for pair in pairs], [seed for seed, _ in pairs]) for pairs in commits.values()]
    batches = [(name, over(pairs)) for name, pairs in commits.items()] if len(commits) > 1 else []
    whole = over(measured)
    return Comparison(arm, outcome, whole, whole.p, batches, batches_differ(means))


def findings(study: Study, condition: str) -> list[str]:
    """Sentences on the first outcome that the runs have, or on each arm where there is nothing to compare."""
    compared = [c for c in compare(study, condition) if c.difference.n > 1]
    first = [c for c in compared if c.outcome is compared[0].outcome]
    told = [c for c in first if c.verdict in ("higher", "lower") or c.batches_p < 0.05]
    lines = [sentence(c, study.baseline) for c in told]
    others = [c for c in first if c not in told]
    for words in dict.fromkeys(c.verdict for c in others):
        lines.append(f"{first[0].outcome.title}: {_grouped([c for c in others if c.verdict == words], study.baseline)}")
    alike = _identical_arms(study, condition)
    lines += [f"{one} and {other} are identical: their runs logged the same numbers." for one, other in alike]
    if compared:
        return lines
    for outcome in OUTCOMES:
        ends = {run.label: outcome.measure(run) for run in study.runs if run.condition == condition and run.ended}
        listed = [f"{label} {value:.{outcome.digits}f}" for label, value in ends.items() if np.isfinite(value)]
        if listed:
            return [f"{outcome.title}: {'; '.join(listed)}.", *lines]
    return lines


def sentence(c: Comparison, baseline: str) -> str:
    """A comparison over two seeds or more in words, with what an undecided one could have detected."""
    d, outcome = c.difference, c.outcome
    against = f"{outcome.title}: {c.arm} against {baseline}"
    if d.identical:
        return f"{against} is identical over {d.n} seeds."
    words = c.verdict
    if words in ("higher", "lower"):
        words = f"{c.arm} is {words} (p {probability(c.p)})"
    elif words == "undecided":
        effect = f"{d.detectable:.{outcome.digits}f}"
        words = f"no difference decided (p {probability(c.p)}); one of {effect} would have been found with 80 % power"
    if c.batches_p < 0.05:
        parts = ", ".join(f"{outcome.signed(batch.mean)} at {commit}" for commit, batch in c.batches)
        words += f"; the commits disagree ({parts})"
    return f"{against} {outcome.signed(d.mean)} {outcome.interval(d.low, d.high)} over {d.n} seeds: {words}."


def _grouped(comparisons: Sequence[Comparison], baseline: str) -> str:
    """One sentence on the arms of one outcome that share a verdict other than higher or lower."""
    outcome, word = comparisons[0].outcome, comparisons[0].verdict
    if word == "identical":
        return f"{', '.join(c.arm for c in comparisons)} identical to {baseline}."
    sizes = ", ".join(
        f"{c.arm} {outcome.signed(c.difference.mean)} {outcome.interval(c.difference.low, c.difference.high)}"
        for c in comparisons
    )
    if word != "undecided":
        return f"{sizes} against {baseline}: {word}."
    largest = f"{max(c.difference.detectable for c in comparisons):.{outcome.digits}f}"
    found = f"one of {largest} would have been found in each with 80 % power"
    return f"no difference to {baseline} decided for {sizes}; {found}."


def _identical_arms(study: Study, condition: str) -> list[tuple[str, str]]:
    """Pairs of arms whose runs logged identical rewards, seed by seed."""

    def logged_by(run: Run) -> tuple[str | bytes, ...]:
        keys = ("reward/mean", "eval/pass_at_1", "entropy")
        return run.seed, run.branch, *(run.series(key)[1].tobytes() for key in keys)

    logged = {arm: [logged_by(run) for run in study.select(arm, condition) if run.rows] for arm in study.arms}
    return [(one, other) for one, other in combinations(study.arms, 2) if logged[one] and logged[one] == logged[other]]


def probability(p: float) -> str:
    """A p-value for tables and sentences; "" for NaN."""
    if np.isfinite(p):
        return f"{p:.3f}" if p >= 0.001 else "< 0.001"
    return ""
