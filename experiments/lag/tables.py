"""The tables of the sweep of lags, what its hypotheses ask, and the page of both.

python -m experiments.lag.tables runs/lag                        # prints the page
python -m experiments.lag.tables runs/lag --pack OUT.tar.xz
python -m experiments.lag.tables --write       # results/lag.md and its figure out of the committed data
"""

import argparse
import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.lag.sweep import LAGS
from experiments.routing_replay.table_parts import (
    SAMPLED,
    Table,
    collapsed,
    interval,
    markdown,
    pack,
    start_of,
    unpacked,
)
from jaxrl_llm.report.comparisons import probability
from jaxrl_llm.report.read import Run, Study, load
from jaxrl_llm.report.statistics import LEVEL, MINIMUM_SEEDS, PairedDifference, holm, paired_difference
from jaxrl_llm.report.style import INK, colour, panels

RESULTS = Path(__file__).with_name("results")
RECIPES = ("GRPO", "GSPO", "SAPO")
ADDED = ("", "+R3", "+decoupled", "+decoupled+R3")  # what a recipe's name goes on with
TUNED, HIGH = "tuned", "high rate"
HARMLESS = 0.03
SECOND = 905  # the first seed of the second batch
SETTLED = 10  # the step from which staleness is measured


def arm_of(lag: int) -> str:
    return f"lag {lag}" if lag else "no lag"


def ends(study: Study, condition: str, lag: int) -> dict[str, float]:
    """Held-out sampled accuracy at the end, by seed; a run that diverged has 0."""
    return {run.seed: SAMPLED.measure(run) for run in study.select(arm_of(lag), condition) if run.ended}


def losses(study: Study, condition: str, lag: int) -> dict[str, float]:
    """Differences of the end to the one without a lag, by seed."""
    late, fresh = ends(study, condition, lag), ends(study, condition, 0)
    return {seed: late[seed] - fresh[seed] for seed in fresh if seed in late}


def over_seeds(values: dict[str, float], less: dict[str, float] | None = None) -> PairedDifference:
    """The mean over the seeds that both have, with its interval."""
    other = dict.fromkeys(values, 0.0) if less is None else less
    both = [seed for seed in values if seed in other]
    return paired_difference([values[seed] for seed in both], [other[seed] for seed in both])


def told(d: PairedDifference) -> str:
    """With its interval where there are enough seeds for one."""
    return interval(d) if d.n >= MINIMUM_SEEDS else SAMPLED.signed(d.mean) if d.n else ""


def conditions(study: Study, rate: str) -> list[str]:
    names = [f"{recipe}{added}, {rate}" for recipe in RECIPES for added in ADDED]
    return [name for name in names if study.select(arm_of(0), name)]


def accuracy(study: Study) -> Table:
    """Condition, seeds, accuracy from start to end without a lag, the difference at each lag, the least detectable."""
    rows = []
    for condition in conditions(study, TUNED) + conditions(study, HIGH):
        fresh = [run for run in study.select(arm_of(0), condition) if run.ended]
        found = [over_seeds(losses(study, condition, lag)) for lag in LAGS[1:]]
        start, end = (np.mean([measure(run) for run in fresh]) for measure in (start_of, SAMPLED.measure))
        detectable = max((d.detectable for d in found if d.n >= MINIMUM_SEEDS), default=float("nan"))
        cells = [condition, str(len(fresh)), f"{start:.3f} -> {end:.3f}", *map(told, found)]
        rows.append([*cells, f"{detectable:.3f}" if np.isfinite(detectable) else ""])
    return rows


def staleness(study: Study) -> Table:
    """Condition, and at each lag k3 to the sampler, tokens whose ratio to it is beyond 2, experts that differ."""
    rows = []
    for condition in conditions(study, TUNED) + conditions(study, HIGH):
        cells = []
        for lag in LAGS[1:]:
            runs = study.select(arm_of(lag), condition)
            k3, beyond, flips = (
                float(np.nanmean([_settled(run, key) for run in runs]))
                for key in ("kl/sampler", "mismatch/above_2", "routing/flips_sampler_old")
            )
            cells.append(f"{k3:.2g}, {100 * beyond:.1f} %, {100 * flips:.1f} %")
        rows.append([condition, *cells])
    return rows


def collapses(study: Study) -> Table:
    """Condition, and at each lag how many runs collapsed."""
    return [
        [condition, *(collapsed(study.select(arm_of(lag), condition)) for lag in LAGS)]
        for condition in conditions(study, TUNED) + conditions(study, HIGH)
    ]


def _settled(run: Run, key: str) -> float:
    """The mean from step SETTLED on; NaN where a run ended before."""
    steps, values = run.series(key)
    return float(np.mean(values[steps >= SETTLED])) if (steps >= SETTLED).any() else float("nan")


@dataclass(frozen=True)
class Question:
    """One number a seed that a hypothesis is about, and what of its interval and corrected p makes it hold."""

    hypothesis: str
    what: str
    values: dict[str, float]
    holds: Callable[[PairedDifference, float], bool]
    less: dict[str, float] | None = None

    @property
    def found(self) -> PairedDifference:
        return over_seeds(self.values, self.less)

    @property
    def batches(self) -> list[PairedDifference]:
        parts = [
            {seed: x for seed, x in self.values.items() if (int(seed) < SECOND) == first} for first in (True, False)
        ]
        return [over_seeds(part, self.less) for part in parts]


def _harmless(d: PairedDifference, p: float) -> bool:
    return d.low > -HARMLESS and d.high < HARMLESS


def _below(d: PairedDifference, p: float) -> bool:
    return d.mean < 0 and p < 1 - LEVEL


def _above(d: PairedDifference, p: float) -> bool:
    return d.mean > 0 and p < 1 - LEVEL


def questions(study: Study) -> list[Question]:
    """Return the questions that have enough seeds."""
    found = [
        Question("L1", f"{name}, {TUNED}: lag {lag} less none", losses(study, f"{name}, {TUNED}", lag), _harmless)
        for name, lag in itertools.product(RECIPES, (1, 2))
    ]
    lost = {name: losses(study, f"{name}, {HIGH}", 8) for name in [r + a for r in RECIPES for a in ADDED]}
    found.append(Question("L2", f"GRPO, {HIGH}: lag 8 less none", lost["GRPO"], _below))
    what = f"GRPO, {HIGH}, lag 8: the loss with decoupled less that without"
    found.append(Question("L3", what, lost["GRPO+decoupled"], _above, lost["GRPO"]))
    for name, lag in itertools.product(("GRPO", "GRPO+decoupled"), LAGS[1:]):
        with_r3, without = (losses(study, f"{one}, {HIGH}", lag) for one in (f"{name}+R3", name))
        what = f"{name}, {HIGH}, lag {lag}: the loss with R3 less that without"
        found.append(Question("L4", what, with_r3, _harmless, without))
    for name, holds in (("SAPO", _below), ("GSPO", _above)):
        found.append(Question("L5", f"{HIGH}, lag 8: the loss of {name} less GRPO's", lost[name], holds, lost["GRPO"]))
    return [one for one in found if one.found.n >= MINIMUM_SEEDS]


def judged(study: Study) -> Table:
    """Hypothesis, what, seeds, the difference, the two batches, the least detectable, p corrected within a hypothesis,
    word."""
    rows = []
    for _, group in itertools.groupby(questions(study), key=lambda one: one.hypothesis):
        own = list(group)
        for one, p in zip(own, holm([q.found.p for q in own]), strict=True):
            d = one.found
            word = "holds" if one.holds(d, p) else "not shown"
            cells = [one.hypothesis, one.what, str(d.n), interval(d), *map(told, one.batches), f"{d.detectable:.3f}"]
            rows.append([*cells, probability(p), word])
    return rows


def growth(study: Study) -> Table:
    """L6: recipe, and k3 to the sampler at lag 4 over that at lag 1, a geometric mean over seeds with its interval."""
    rows = []
    for recipe in RECIPES:
        sizes = [
            {run.seed: _settled(run, "kl/sampler") for run in study.select(arm_of(lag), f"{recipe}, {TUNED}")}
            for lag in (4, 1)
        ]
        logs = [{seed: float(np.log(x)) for seed, x in one.items() if x > 0} for one in sizes]
        d = over_seeds(*logs)
        if d.n >= MINIMUM_SEEDS:
            middle, low, high = np.exp([d.mean, d.low, d.high])
            word = "holds" if low >= 4 and high <= 16 else "not shown"
            rows.append(["L6", recipe, str(d.n), f"x{middle:.2f} [{low:.2f}, {high:.2f}]", word])
    return rows


AT = [f"lag {lag}" for lag in LAGS[1:]]
SECTIONS: Sequence[tuple[str, Sequence[str], Callable[[Study], Table]]] = (
    (
        "The hypotheses. Differences are paired by seed; p is corrected (Holm) within a hypothesis; harmless means an "
        f"interval within {HARMLESS} of zero.",
        ["hypothesis", "what", "seeds", "difference", "first batch", "second", "detectable", "corrected p", "word"],
        judged,
    ),
    (
        "Staleness at lag 4 over that at lag 1 (k3 to the sampler, from the tenth step on).",
        ["hypothesis", "recipe, tuned", "seeds", "factor", "word"],
        growth,
    ),
    (
        "Held-out sampled accuracy without a lag, from the start to the end of 30 rollouts, and what a lag changes at "
        "the end; the largest difference that would not have been detected.",
        ["condition", "seeds", "no lag", *AT, "detectable"],
        accuracy,
    ),
    (
        "From the tenth step on: k3 to the sampler, tokens whose ratio to it is above 2 or below 1/2, experts that "
        "differ from the sampler's.",
        ["condition", *AT],
        staleness,
    ),
    ("Runs that collapsed.", ["condition", "no lag", *AT], collapses),
)


def figure(study: Study) -> Figure:
    """At each rate what a lag changes at the end, of each recipe with and without the correction, with its interval."""
    drawn, axes = panels([f"held-out sampled, less no lag: {rate}" for rate in (TUNED, HIGH)], columns=2, height=3.4)
    for ax, rate in zip(axes, (TUNED, HIGH), strict=True):
        for place, name in enumerate(itertools.product(RECIPES, ("", "+decoupled"))):
            found = [over_seeds(losses(study, f"{''.join(name)}, {rate}", lag)) for lag in LAGS[1:]]
            x = np.arange(1, len(LAGS)) + 0.05 * (place - 2.5)
            means = [d.mean for d in found]
            ends = np.abs(np.array([(d.low, d.high) for d in found]).T - means)
            line = {"color": colour(RECIPES, name[0]), "linestyle": "--" if name[1] else "-", "linewidth": 1.2}
            ax.errorbar(x, means, ends, marker="o", markersize=4, label="".join(name), **line)
        ax.axhline(0, color=INK, linewidth=0.8)
        ax.set_xticks(range(1, len(LAGS)), AT, fontsize=8)
    axes[0].legend(fontsize=8, frameon=False)
    return drawn


def page(study: Study) -> str:
    parts = ["# `lag`\n\nWritten by `python -m experiments.lag.tables --write`; do not edit.\n"]
    for caption, head, make in SECTIONS:
        if rows := make(study):
            parts.append(f"{caption}\n\n{markdown([head, ['--'] * len(head), *rows])}")
    return "\n".join(parts)


def committed(folder: Path) -> Study:
    """The data of the repository, unpacked in `folder`."""
    return unpacked(RESULTS / "lag.tar.xz", "lag", folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path, nargs="?", help="of the sweep; none: the committed data")
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--write", action="store_true", help="into results/lag.md")
    given = parser.parse_args()
    if given.dir and given.pack:
        pack(given.dir, given.pack, "metrics.jsonl")
    with tempfile.TemporaryDirectory() as folder:
        study = load(given.dir) if given.dir else committed(Path(folder))
        text = page(study)
        if given.write:
            (RESULTS / "lag.md").write_text(text)
            figure(study).savefig(RESULTS / "lag.png")
    print(text, end="")


if __name__ == "__main__":
    main()
