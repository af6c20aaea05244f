"""How every arm differs from the baseline: outcome by outcome, corrected for the number of arms, batch by batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.report.read import Run, Study
from jaxrl_llm.report.statistics import PairedDifference, batches_differ, holm, paired_difference, verdict

__all__ = [
    "OUTCOMES",
    "Comparison",
    "Outcome",
    "batch_table",
    "compare",
    "difference_table",
    "grouped",
    "identical_arms",
    "sentence",
]


@dataclass(frozen=True)
class Outcome:
    """One number per run, compared pair by pair."""

    name: str
    measure: Callable[[Run], float]
    digits: int = 3

    def signed(self, value: float) -> str:
        return f"{value:+.{self.digits}f}"

    def interval(self, low: float, high: float) -> str:
        return f"[{self.signed(low)}, {self.signed(high)}]"


def _policy(key: str, **kwargs: int) -> Callable[[Run], float]:
    # A run that ended on a number that is not finite has no usable policy: it counts as reward 0, it is not left out.
    return lambda run: 0.0 if run.diverged and run.series(key)[0].size else run.average(key, **kwargs)


_REWARD = Outcome("training reward, last 5", _policy("reward/mean", last=5))
_TIME = Outcome("rollouts without collapse", lambda run: run.collapse()[0], digits=1)  # shown where a run collapsed
OUTCOMES: Sequence[Outcome] = (
    Outcome("held-out greedy, end", _policy("eval/greedy", last=1)),
    Outcome("held-out sampled, end", _policy("eval/pass_at_1", last=1)),
    _REWARD,
    Outcome("held-out pairs, end", _policy("eval/pair_accuracy", last=1)),
    _TIME,
)


@dataclass(frozen=True)
class Comparison:
    """One arm against the baseline in one outcome; `p` is Holm's over the arms that this outcome judges."""

    arm: str
    outcome: Outcome
    difference: PairedDifference
    p: float
    batches: Sequence[tuple[str, PairedDifference]]  # (commit, difference of its pairs), where there are several
    batches_p: float  # that the batches have one mean

    @property
    def verdict(self) -> str:
        return verdict(self.difference, self.p)


def compare(study: Study, condition: str) -> list[Comparison]:
    """Every arm against the baseline, in every outcome that some run has, over the pairs whose two runs have ended.

    A pair is two runs of one seed (and one branch, where runs branch off a trajectory). Holm's correction is over the
    arms of one outcome that have enough seeds for a verdict. Branches have no training reward of their own: their first
    rollout is the state's, for all arms.
    """
    ended = {
        arm: {(run.seed, run.branch): run for run in study.select(arm, condition) if run.ended} for arm in study.arms
    }
    fell = not study.branching and any(run.collapse()[1] for runs in ended.values() for run in runs.values())
    compared = []
    skipped = {_REWARD.name, _TIME.name} if study.branching else set() if fell else {_TIME.name}
    for outcome in [one for one in OUTCOMES if one.name not in skipped]:
        rows = [(arm, *_difference(outcome, ended[arm], ended[study.baseline])) for arm in study.arms[1:]]
        rows = [row for row in rows if row[1].n]
        judged = [d.p if verdict(d, 1.0) == "undecided" else float("nan") for _, d, _, _ in rows]
        corrected = holm(judged)
        compared += [
            Comparison(arm, outcome, d, float(p), batches, batches_p)
            for (arm, d, batches, batches_p), p in zip(rows, corrected, strict=True)
        ]
    return compared


_Pair = tuple[str, str]  # seed, branch


def _difference(
    outcome: Outcome, ours: dict[_Pair, Run], theirs: dict[_Pair, Run]
) -> tuple[PairedDifference, list[tuple[str, PairedDifference]], float]:
    pairs = [pair for pair in theirs if pair in ours]
    measured = {pair: (outcome.measure(ours[pair]), outcome.measure(theirs[pair])) for pair in pairs}
    pairs = [pair for pair in pairs if np.all(np.isfinite(measured[pair]))]
    batch_of = {pair: ours[pair].batch for pair in pairs}

    def over(chosen: Sequence[_Pair]) -> PairedDifference:
        left, right = np.array([measured[pair] for pair in chosen], np.float64).reshape(-1, 2).T
        return paired_difference(left, right, [seed for seed, _ in chosen])

    names = list(dict.fromkeys(batch_of.values()))
    members = [[pair for pair in pairs if batch_of[pair] == name] for name in names]
    batches = [(name, over(chosen)) for name, chosen in zip(names, members, strict=True)] if len(names) > 1 else []
    apart = batches_differ([_by_seed(measured, chosen) for chosen in members])
    return over(pairs), batches, apart


def _by_seed(measured: dict[_Pair, tuple[float, float]], pairs: Sequence[_Pair]) -> list[float]:
    seeds = dict.fromkeys(seed for seed, _ in pairs)
    return [float(np.mean([np.subtract(*measured[p]) for p in pairs if p[0] == seed])) for seed in seeds]


def difference_table(study: Study, condition: str) -> tuple[list[str], list[list[str]]]:
    """Paired differences with intervals, what they could have detected and a verdict; arms of one seed are left out."""
    header = [
        "outcome",
        "arm",
        "difference",
        "95 % t interval",
        "bootstrap",
        "p (Holm)",
        "detectable",
        "seeds",
        "verdict",
    ]
    rows = []
    for c in compare(study, condition):
        d, outcome = c.difference, c.outcome
        if d.n > 1:
            rows.append(
                [
                    outcome.name,
                    c.arm,
                    outcome.signed(d.mean),
                    outcome.interval(d.low, d.high),
                    outcome.interval(d.bootstrap_low, d.bootstrap_high),
                    _probability(c.p),
                    "" if d.identical else f"{d.detectable:.{outcome.digits}f}",
                    str(d.n) if d.n == d.pairs else f"{d.n} ({d.pairs} pairs)",
                    c.verdict,
                ]
            )
    return header, rows


def batch_table(study: Study, condition: str) -> tuple[list[str], list[list[str]]]:
    """The same differences by commit, one column for each commit of the arms' runs; empty if there is only one.

    A cell has the difference, its interval and the seeds in parentheses.
    """
    compared = [c for c in compare(study, condition) if c.batches]
    names = list(dict.fromkeys(name for c in compared for name, _ in c.batches))

    def cell(c: Comparison, d: PairedDifference) -> str:
        interval = f" {c.outcome.interval(d.low, d.high)}" if d.n > 1 else ""
        return f"{c.outcome.signed(d.mean)}{interval} ({d.n})"

    rows = []
    for c in compared:
        cells = {name: cell(c, d) for name, d in c.batches}
        rows.append([c.outcome.name, c.arm, *(cells.get(name, "") for name in names), _probability(c.batches_p)])
    return ["outcome", "arm", *names, "one mean (p)"], rows


def sentence(c: Comparison, baseline: str) -> str:
    """A comparison in words, with the detectable difference of a null result and whether its batches agree."""
    d, outcome = c.difference, c.outcome
    against = f"{outcome.name}: {c.arm} against {baseline}"
    if d.identical:
        return f"{against} is identical over {_seeds(d.n)}."
    size = outcome.signed(d.mean) + (f" {outcome.interval(d.low, d.high)}" if d.n > 1 else "")
    words = {
        "higher": f"{c.arm} is higher (p {_probability(c.p)})",
        "lower": f"{c.arm} is lower (p {_probability(c.p)})",
        "undecided": f"no difference decided (p {_probability(c.p)}); one of {d.detectable:.{outcome.digits}f} would "
        "have been found with 80 % power",
    }.get(c.verdict, c.verdict)
    parts = f" ({', '.join(f'{outcome.signed(b.mean)} at {name}' for name, b in c.batches)})" if c.batches else ""
    apart = f"; the commits disagree{parts}" if c.batches_p < 0.05 else ""
    return f"{against} {size} over {_seeds(d.n)}: {words}{apart}."


def grouped(comparisons: Sequence[Comparison], baseline: str) -> str:
    """Arms of one outcome and one verdict other than higher or lower, in one sentence."""
    digits = comparisons[0].outcome.digits
    if comparisons[0].difference.identical:
        return f"{', '.join(c.arm for c in comparisons)} identical to {baseline}."
    sizes = ", ".join(
        f"{c.arm} {c.outcome.signed(c.difference.mean)} {c.outcome.interval(c.difference.low, c.difference.high)}"
        for c in comparisons
    )
    if comparisons[0].verdict != "undecided":
        return f"{sizes} against {baseline}: {comparisons[0].verdict}."
    largest = max(c.difference.detectable for c in comparisons)
    return (
        f"no difference to {baseline} decided for {sizes}; one of {largest:.{digits}f} would have been found in each "
        "with 80 % power."
    )


def identical_arms(study: Study, condition: str) -> list[tuple[str, str]]:
    """Pairs of arms whose runs logged identical rewards, seed by seed."""

    def logged(arm: str) -> list[tuple[object, ...]]:
        return [
            (
                run.seed,
                run.branch,
                *(run.series(key)[1].tobytes() for key in ("reward/mean", "eval/pass_at_1", "entropy")),
            )
            for run in study.select(arm, condition)
            if run.rows
        ]

    series = {arm: logged(arm) for arm in study.arms}
    return [
        (arm, other)
        for i, arm in enumerate(study.arms)
        for other in study.arms[i + 1 :]
        if series[arm] and series[arm] == series[other]
    ]


def _probability(p: float) -> str:
    if not np.isfinite(p):
        return ""
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def _seeds(n: int) -> str:
    return "1 seed" if n == 1 else f"{n} seeds"
