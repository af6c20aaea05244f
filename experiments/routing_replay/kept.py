"""Gain against the gradient that an arm keeps, by the sign of the advantage; and gain against the number of rollouts,
of long branches and of whole runs.

    python -m experiments.routing_replay.kept runs/negatives                               # prints Markdown
    python -m experiments.routing_replay.kept runs/negatives --figure OUT.png
    python -m experiments.routing_replay.kept runs/negatives_dose --keep 0.15              # the clip that keeps so much
    python -m experiments.routing_replay.kept runs/negatives_rollouts --pack OUT.tar.xz
    python -m experiments.routing_replay.kept runs/negatives_runs --figure OUT.png

The gradient kept is the mean of gradient_weight/positive and /negative over a branch's updates: 1 is REINFORCE's. With
--keep a table gives for every condition the dual clip at which the arm "dual clip X" keeps that share for A < 0,
interpolated between the doses that were run: an arm at that clip is matched on the gradient of wrong answers.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from experiments.routing_replay.branches import by_seed, difference
from experiments.routing_replay.table_parts import SAMPLED, Table, collapsed, command, interval, mean, start_to_end
from jaxrl_llm.report.comparisons import probability
from jaxrl_llm.report.read import Run, Study
from jaxrl_llm.report.statistics import MINIMUM_SEEDS, PairedDifference, holm, paired_difference
from jaxrl_llm.report.style import INK, colour, label_ends, line, panels

EARLY = 10  # rollouts in which few runs have collapsed, after which they drift little
BATCH = ", seeds "  # of a condition's name where it is one batch of it
LATER = 510  # the first seed of `negatives_again`
POSITIVE, NEGATIVE = "gradient_weight/positive", "gradient_weight/negative"
DOSE = "dual clip "  # an arm of the dose, before its bound
# Which arms the hypotheses compare, beside each with GRPO.
CONTRASTS = (
    ("GRPO, negatives cut", "GSPO"),
    ("GSPO, negatives cut", "GSPO"),
    ("GRPO clip 1e-08, both sides", "GSPO"),
    ("GRPO clip 1e-08, both sides", "GRPO clip 1e-08"),
    ("GSPO", "GRPO clip 1e-08"),
    ("OPSM", "GRPO, negatives cut"),
    ("OPSM", "GSPO"),
)


def table(study: Study) -> Table:
    """Condition, arm, trajectories, gradient kept for A > 0 and A < 0, kl/old, difference, what would be detected."""
    rows = []
    for condition, arm in _each(study):
        runs = study.select(arm, condition)
        differs = _differs(study, arm, condition)
        rows.append(
            [condition, arm, *_kept(runs), f"{mean(runs, 'kl/old'):.3f}", *(differs or [f"({start_to_end(runs)})", ""])]
        )
    return rows


def ends(study: Study) -> Table:
    """Rows of whole runs: condition, arm, seeds, gradient kept for A > 0 and A < 0, kl/old in the last five rollouts,
    its median over the first ten and over all, entropy in the last five, sampled accuracy from start to end,
    difference, what would be detected, how many collapsed."""
    rows = []
    for condition, arm in _each(study):
        runs = [run for run in study.select(arm, condition) if run.ended]
        drifts = mean(runs, "kl/old", last=5), drift(runs, EARLY), drift(runs)
        numbers = [" / ".join(f"{x:.3f}" for x in drifts), f"{mean(runs, 'entropy', last=5):.3f}", start_to_end(runs)]
        differs = _differs(study, arm, condition) or ["", ""]
        rows.append([condition, arm, *_kept(runs), *numbers, *differs, collapsed(runs)])
    return rows


def _kept(runs: Sequence[Run]) -> list[str]:
    return [str(len({run.seed for run in runs})), " / ".join(f"{mean(runs, key):.2f}" for key in (POSITIVE, NEGATIVE))]


def _differs(study: Study, arm: str, condition: str) -> list[str]:
    """The difference to the baseline and what would be detected; nothing of the baseline itself."""
    if arm == study.baseline:
        return []
    found = difference(study, arm, condition)
    return [_told(found), f"{found.detectable:.3f}" if found.n >= MINIMUM_SEEDS else ""]


def _each(study: Study) -> list[tuple[str, str]]:
    return [(c, arm) for c in study.conditions for arm in study.arms if study.select(arm, c)]


def _told(d: PairedDifference) -> str:
    """With its interval where there are enough trajectories for one."""
    return interval(d) if d.n >= MINIMUM_SEEDS else SAMPLED.signed(d.mean)


def contrasts(study: Study) -> Table:
    """Condition, the arms of CONTRASTS, n trajectories or seeds, their difference, detectable, p corrected for all."""
    found = [
        (condition, f"{arm} minus {other}", difference(dataclasses.replace(study, baseline=other), arm, condition))
        for condition in study.conditions
        for arm, other in CONTRASTS
        if study.select(arm, condition) and study.select(other, condition)
    ]
    found = [one for one in found if one[2].n >= MINIMUM_SEEDS]
    corrected = holm([d.p for *_, d in found])
    return [
        [condition, arms, str(d.n), interval(d), f"{d.detectable:.3f}", probability(p)]
        for (condition, arms, d), p in zip(found, corrected, strict=True)
    ]


def apart(study: Study) -> Table:
    """Difference of each arm to the baseline on the dense model less that on the mixture, over the seeds of both, with
    p corrected for all such rows; where there is a second batch, in each batch too, without p."""
    found: list[tuple[str, str, PairedDifference]] = []
    for condition in [one for one in study.conditions if "dense" in one.split(", ")]:
        for arm in study.arms[1:]:
            dense, mixture = (by_seed(study, arm, condition.replace("dense", name, 1)) for name in ("dense", "mixture"))
            both = sorted(dense.keys() & mixture.keys())
            later = [seed for seed in both if seed >= LATER]
            batches = {f"{BATCH}below {LATER}": both[: -len(later)], f"{BATCH}from {LATER}": later} if later else {}
            for name, seeds in ({"": both} | batches).items():
                if len(seeds) >= MINIMUM_SEEDS:
                    d = paired_difference([dense[seed] for seed in seeds], [mixture[seed] for seed in seeds])
                    found.append((condition + name, arm, d))
    corrected = iter(holm([d.p for told, _, d in found if BATCH not in told]))
    return [
        [
            *(told, arm, str(d.n), interval(d), f"{d.detectable:.3f}"),
            "" if BATCH in told else probability(next(corrected)),
        ]
        for told, arm, d in found
    ]


def evaluated(study: Study) -> list[int]:
    """The rollouts of a branch after which every arm was evaluated, its end included."""
    steps: dict[int, None] = {}
    for run in study.runs:
        steps |= dict.fromkeys(int(row["step"]) for row in run.rows if "eval/pass_at_1" in row)
    return sorted(step for step in steps if step)


def after(study: Study, arm: str, condition: str, rollouts: int) -> PairedDifference:
    """The difference to the baseline after so many rollouts of a branch; a branch that diverged before counts as 0."""
    found = by_seed_after(study, arm, condition, rollouts)
    return paired_difference(list(found.values()), np.zeros(len(found)))


def by_seed_after(study: Study, arm: str, condition: str, rollouts: int) -> dict[str, float]:
    """That difference of each trajectory, the mean over its states."""

    def found(arm: str) -> dict[tuple[str, str], float]:
        at = {}
        for run in study.select(arm, condition):
            steps, values = run.series("eval/pass_at_1")
            here = values[steps == rollouts]
            if here.size or run.diverged:
                at[run.seed, run.branch] = float(here[0]) if here.size else 0.0
        return at

    ours, theirs = found(arm), found(study.baseline)
    own: dict[str, list[float]] = {}
    for seed, state in theirs:
        if (seed, state) in ours:
            own.setdefault(seed, []).append(ours[seed, state] - theirs[seed, state])
    return {seed: float(np.mean(values)) for seed, values in own.items()}


def by_rollouts(study: Study) -> Table:
    """A header, and of each condition the difference of each arm to the baseline, and of CONTRASTS, after every number
    of rollouts."""
    steps = evaluated(study)
    if len(steps) < 2:
        return []
    rows = [["condition", "arms", *(f"{step} rollout{'s' * (step > 1)}" for step in steps)]]
    for condition in study.conditions:
        for arm, other in [*((arm, study.baseline) for arm in study.arms[1:]), *CONTRASTS]:
            if study.select(arm, condition) and study.select(other, condition):
                against = dataclasses.replace(study, baseline=other)
                found = [_told(after(against, arm, condition, step)) for step in steps]
                rows.append([condition, f"{arm} minus {other}", *found])
    return rows


def stopped(study: Study) -> Table:
    """A header, and of CONTRASTS on each model, after every number of rollouts, the difference of a condition with a
    stop less that of its sister without, by the seeds that both have."""
    steps = evaluated(study)
    rows = [["model", "arms", *(f"{step} rollout{'s' * (step > 1)}" for step in steps)]]
    pairs = [(one, one.partition(", ")[0] + ", all updates") for one in study.conditions if "stopped" in one]
    for (condition, whole), (arm, other) in itertools.product(pairs, CONTRASTS):
        if not (study.select(arm, condition) and study.select(other, condition)):
            continue
        against = dataclasses.replace(study, baseline=other)
        found = []
        for step in steps:
            with_stop, without = (by_seed_after(against, arm, one, step) for one in (condition, whole))
            both = [seed for seed in with_stop if seed in without]
            found.append(_told(paired_difference([with_stop[seed] for seed in both], [without[seed] for seed in both])))
        rows.append([whole.partition(", ")[0], f"{arm} minus {other}", *found])
    return rows


def ranked(study: Study) -> Table:
    """Condition, number of doses, Spearman's correlation of the dose (its place from the tightest) with the gain."""
    rows = []
    for condition in study.conditions:
        doses = [arm for arm in study.arms if arm.startswith(DOSE) and study.select(arm, condition)]
        gains = [difference(study, arm, condition).mean for arm in doses]
        if len(doses) > 2:
            rank: float = stats.spearmanr(range(len(doses)), gains)[0]  # pyright: ignore
            rows.append([condition, str(len(doses)), f"{rank:+.2f}"])
    return rows


# Rollouts of a run, first and last; the answers of the first one are the same for all arms.
STRETCHES = ((2, 2), (3, 4), (5, 8), (9, 16), (17, 30))


def along(study: Study) -> Table:
    """A header, and of CONTRASTS in each condition the difference in training reward over stretches of whole runs."""
    rows = [["condition", "arms", *(f"{a} to {b}" if a < b else str(a) for a, b in STRETCHES)]]
    for condition in study.conditions:
        for arm, other in CONTRASTS:
            ours, theirs = (
                {run.seed: run for run in study.select(one, condition) if run.ended} for one in (arm, other)
            )
            both = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
            if len(both) >= MINIMUM_SEEDS:
                found = [
                    paired_difference([_reward(one, a, b) for one, _ in both], [_reward(one, a, b) for _, one in both])
                    for a, b in STRETCHES
                ]
                rows.append([condition, f"{arm} minus {other}", *map(interval, found)])
    return rows


def _reward(run: Run, first: int, last: int) -> float:
    """Mean reward of the answers of these rollouts; 0 where a run diverged before."""
    steps, values = run.series("reward/mean")
    own = values[(steps >= first) & (steps <= last)]
    return float(own.mean()) if own.size else 0.0


def clip_of(keep: float, clips: Sequence[float], kept: Sequence[float]) -> float:
    """The clip at which an arm keeps this share, between those that were run; NaN outside what they keep.

    It is interpolated in the logarithm of clip - 1, the room that the ratio has; the shares rise with the clip.
    """
    rooms, order = np.log(np.asarray(clips) - 1), np.argsort(clips)
    return 1 + float(np.exp(np.interp(keep, np.asarray(kept)[order], rooms[order], left=np.nan, right=np.nan)))


def matched(study: Study, keep: float) -> Table:
    """Condition, and the dual clip that keeps this share of the gradient of A < 0."""
    rows = []
    for condition in study.conditions:
        doses = [arm for arm in study.arms if arm.startswith(DOSE) and study.select(arm, condition)]
        bounds = {arm: float(arm.removeprefix(DOSE)) for arm in doses if arm != f"{DOSE}off"}
        shares = [mean(study.select(arm, condition), NEGATIVE) for arm in bounds]
        if bounds:
            rows.append([condition, f"keep {keep:g}", f"dual_clip={clip_of(keep, list(bounds.values()), shares):.4g}"])
    return rows


def figure(study: Study) -> Figure:
    """Gain against the gradient kept for A < 0, the models over each other; of long branches and whole runs against
    the rollouts."""
    if not study.branching:
        return _along_runs(study)
    return _along_rollouts(study) if len(evaluated(study)) > 1 else _along_kept(study)


def _along_kept(study: Study) -> Figure:
    """A panel for what conditions have beside their model: filled the first model, hollow the others."""
    beside = list(dict.fromkeys(condition.partition(", ")[2] for condition in study.conditions))
    title = f"{SAMPLED.title}, minus {study.baseline}'s"
    drawn, axes = panels([": ".join(filter(None, (one, title))) for one in beside], columns=2, height=4.2)
    for ax, one in zip(axes, beside, strict=True):
        draw_kept(ax, study, [condition for condition in study.conditions if condition.partition(", ")[2] == one])
    return drawn


def draw_kept(ax: Axes, study: Study, shown: Sequence[str]) -> None:
    """Each arm's difference to the baseline by the gradient that it keeps for A < 0."""
    places: dict[str, tuple[float, str, str]] = {}
    for condition, filled in zip(shown, [True] + [False] * len(shown), strict=False):
        for arm in [arm for arm in study.arms[1:] if study.select(arm, condition)]:
            ink, found = colour(study.arms, arm), difference(study, arm, condition)
            x = mean(study.select(arm, condition), NEGATIVE) + (0 if filled else 0.012)
            _point(ax, x, found, ink, filled)
            places.setdefault(arm, (found.mean, arm, ink))
    ax.axhline(0, color=INK, linewidth=0.8)
    models = [condition.partition(", ")[0] for condition in shown]
    told = "gradient kept for A < 0" + (f" (filled {models[0]}, hollow {models[1]})" if len(models) > 1 else "")
    ax.set_xlabel(told, fontsize=8.5, color=INK)
    label_ends(ax, list(places.values()))


def draw_drift(ax: Axes, study: Study) -> None:
    """Whole runs in which all arms have one rate: the lead of GSPO over the first of CONTRASTS by the drift of that
    arm, by condition. Told by name are those where GSPO is seen to lead."""
    arm, other = CONTRASTS[0]
    own = dataclasses.replace(study, baseline=arm)
    for condition in [one for one in study.conditions if study.select(other, one) and not one.endswith("tuned")]:
        x, found = drift(study.select(arm, condition), EARLY), difference(own, other, condition)
        task, model, *told = condition.split(", ")
        _point(ax, x, found, colour(study.arms, other), model != "dense", "o" if task == "sorting" else "s")
        if model != "dense" and found.low > 0:
            beside = {"textcoords": "offset points", "fontsize": 7, "ha": "right", "va": "center"}
            ax.annotate(", ".join(told), (x, found.mean), (-8, 0), **beside)
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set_xscale("log")
    ax.margins(x=0.15)
    shapes = "filled mixture, hollow dense; squares countdown"
    told = f"KL to old in the first {EARLY} rollouts of {arm.removeprefix('GRPO, ')}, median\n({shapes})"
    ax.set_xlabel(told, fontsize=8.5, color=INK)


def _point(ax: Axes, x: float, found: PairedDifference, ink: str, filled: bool, marker: str = "o") -> None:
    if found.n >= MINIMUM_SEEDS:
        ax.plot([x, x], [found.low, found.high], color=ink, linewidth=1.2, zorder=1)
    ax.plot(x, found.mean, marker, color=ink, markerfacecolor=ink if filled else "white", markersize=6)


def drift(runs: Sequence[Run], first: int | None = None) -> float:
    """The median of KL to old over all their rollouts, or over the first ones of each."""
    return float(np.median(np.concatenate([run.series("kl/old")[1][:first] for run in runs])))


def _along_rollouts(study: Study) -> Figure:
    """A panel a condition, all on one scale."""
    steps = evaluated(study)
    title = f"sampled accuracy, minus {study.baseline}'s"
    drawn, axes = panels([f"{condition}: {title}" for condition in study.conditions], columns=2, height=3.6)
    means = {
        (condition, arm): [after(study, arm, condition, step).mean for step in steps]
        for condition in study.conditions
        for arm in study.arms[1:]
        if study.select(arm, condition)
    }
    every = np.array([0.0, *itertools.chain(*means.values())])
    for ax, condition in zip(axes, study.conditions, strict=True):
        own = {arm: values for (one, arm), values in means.items() if one == condition}
        for arm, values in own.items():
            ax.plot(steps, values, **line(study.arms, arm))
        ax.axhline(0, color=INK, linewidth=0.8)
        ax.set_ylim(every.min() - 0.01, every.max() + 0.01)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_xlabel("rollouts", fontsize=8.5, color=INK)
        label_ends(ax, [(values[-1], arm, colour(study.arms, arm)) for arm, values in own.items()])
    return drawn


def _along_runs(study: Study) -> Figure:
    title = f"reward, minus {study.baseline}'s"
    drawn, axes = panels([f"{condition}: {title}" for condition in study.conditions], columns=2, height=3.6)
    for ax, condition in zip(axes, study.conditions, strict=True):
        baseline = {run.seed: run for run in study.select(study.baseline, condition) if run.ended}
        places = []
        for arm in [arm for arm in study.arms[1:] if study.select(arm, condition)]:
            pairs = [
                (run, baseline[run.seed]) for run in study.select(arm, condition) if run.seed in baseline and run.ended
            ]
            steps = np.unique(np.concatenate([run.series("reward/mean")[0] for run, _ in pairs]))
            means = [np.mean([_reward(run, s, s) - _reward(other, s, s) for run, other in pairs]) for s in steps]
            ax.plot(steps, means, **line(study.arms, arm))
            places.append((float(means[-1]), arm, colour(study.arms, arm)))
        ax.axhline(0, color=INK, linewidth=0.8)
        ax.set_xlabel("rollouts", fontsize=8.5, color=INK)
        label_ends(ax, places)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", type=float, help="the gradient of A < 0 to keep; prints the dual clip that keeps it")

    def tables(study: Study, given: argparse.Namespace) -> list[Table]:
        if given.keep:
            return [matched(study, given.keep)]
        own = [table(study), by_rollouts(study)] if study.branching else [ends(study), along(study)]
        return [*own, contrasts(study), apart(study)]

    command(tables, figure, parser)


if __name__ == "__main__":
    main()
