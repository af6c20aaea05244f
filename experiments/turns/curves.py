"""Held-out accuracy of the sweeps over turns beside the best play: python -m experiments.turns.curves [DIR ...]

Each DIR is of `sweep.py` and named after its game: runs/turns/guess, runs/turns/calculator. Their rows replace those of
their games in results/curves.csv, out of which the table and results/curves.png are made.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.report.read import load
from jaxrl_llm.report.statistics import MINIMUM_SEEDS, paired_difference
from jaxrl_llm.report.style import INK, label_ends, line, panels

FILE = Path(__file__).parent / "results" / "curves.csv"
FIELDS = ("game", "arm", "seed", "step", "eval/greedy", "eval/reward")
DRAWN, GREEDY = "eval/reward", "eval/greedy"
# Exact values of other policies, as lines of the figure; the best one earns 1 in both games.
PLAY = {
    "guess": {"best": 1.0, "uniform": 0.543, "blind": 0.161},
    "calculator": {"best": 1.0, "without calls": 2 / 3},
}


class Curve(NamedTuple):
    """The evaluations of one run: steps, and accuracies by metric."""

    steps: np.ndarray
    values: Mapping[str, np.ndarray]


Curves = Mapping[str, Mapping[str, Mapping[str, Curve]]]  # {game: {arm: {seed: curve}}}, the baseline first


def write(dirs: Sequence[Path]) -> None:
    """Put the evaluations of the sweeps' finished runs in the place of those of their games."""
    games = [folder.resolve().name for folder in dirs]
    kept: list[Any] = [row for row in _stored() if row["game"] not in games]
    for game, folder in zip(games, dirs, strict=True):
        study = load(folder)
        for run in (run for arm in study.arms for run in study.select(arm, "") if run.finished):
            rows = [row for row in run.rows if GREEDY in row]
            kept += [{"game": game, "arm": run.arm, "seed": run.seed} | {k: row[k] for k in FIELDS[3:]} for row in rows]
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)


def _stored() -> list[dict[str, str]]:
    with FILE.open() as file:
        return list(csv.DictReader(file))


def curves() -> Curves:
    """The committed curves."""
    out: dict[str, dict[str, dict[str, Curve]]] = {}
    stored = _stored()
    for game, arm, seed in dict.fromkeys((row["game"], row["arm"], row["seed"]) for row in stored):
        own = [row for row in stored if (row["game"], row["arm"], row["seed"]) == (game, arm, seed)]
        values = {name: np.array([float(row[name]) for row in own]) for name in (GREEDY, DRAWN)}
        steps = np.array([int(row["step"]) for row in own])
        out.setdefault(game, {}).setdefault(arm, {})[seed] = Curve(steps, values)
    return out


def table(found: Curves) -> str:
    """Accuracy at the start and at the end, the best play's, and the paired difference of the ends."""
    lines = [
        "| game | method | seeds | rollouts | greedy | drawn | best | drawn, end minus GRPO's |",
        "| -- " * 8 + "|",
    ]
    for game, arms in found.items():
        for arm, runs in arms.items():
            cells = [game, arm, len(runs), max(int(run.steps[-1]) for run in runs.values())]
            for name in (GREEDY, DRAWN):
                start, end = (np.mean([run.values[name][at] for run in runs.values()]) for at in (0, -1))
                cells.append(f"{start:.3f} -> {end:.3f}")
            cells += [f"{PLAY[game]['best']:g}", "" if arm == "GRPO" else difference(arms[arm], arms["GRPO"])]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def difference(runs: Mapping[str, Curve], others: Mapping[str, Curve]) -> str:
    """The mean difference of the ends over the seeds that both have, with its interval where these are enough."""
    both = [seed for seed in runs if seed in others]
    ends = [[of[seed].values[DRAWN][-1] for seed in both] for of in (runs, others)]
    d = paired_difference(*ends)
    if d.n < MINIMUM_SEEDS:
        return f"{d.mean:+.3f} (n = {d.n})"
    return f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}], detectable {d.detectable:.3f}"


def draw(found: Curves, path: Path) -> None:
    """Accuracy of drawn episodes by rollout: each seed, their mean, and what other policies earn."""
    figure, axes = panels(list(found), columns=2, along="rollouts of 256 episodes")
    for ax, (game, arms) in zip(axes, found.items(), strict=True):
        ends = []
        for arm, runs in arms.items():
            look = line(list(arms), arm)
            for run in runs.values():
                ax.plot(run.steps, run.values[DRAWN], color=look["color"], linewidth=0.7, alpha=0.35)
            whole = [run for run in runs.values() if len(run.steps) == max(len(x.steps) for x in runs.values())]
            mean = np.mean([run.values[DRAWN] for run in whole], axis=0)
            ax.plot(whole[0].steps, mean, **look)
            ends.append((mean[-1], arm, look["color"]))
        for name, value in PLAY[game].items():
            ax.axhline(value, color=INK, linestyle=":", linewidth=1)
            ax.annotate(name, (0, value), xytext=(2, 2), textcoords="offset points", fontsize=7.5, color=INK)
        ax.set_ylim(0, 1.08)
        label_ends(ax, ends)
    axes[0].set_ylabel("held-out drawn episodes that earn 1", fontsize=8.5, color=INK)
    figure.savefig(path)


def main() -> None:
    if len(sys.argv) > 1:
        write([Path(name) for name in sys.argv[1:]])
    found = curves()
    print(table(found))
    if len(sys.argv) > 1:
        draw(found, FILE.with_suffix(".png"))


if __name__ == "__main__":
    main()
