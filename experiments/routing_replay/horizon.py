"""The long runs of `horizon`: their ends, and arms compared after as many groups drawn; tables and figure of this page.

    python -m experiments.routing_replay.horizon runs/routing_replay/horizon                  # prints Markdown
    python -m experiments.routing_replay.horizon runs/routing_replay/horizon --figure OUT.png --pack OUT.tar.xz

DAPO draws rollouts until enough groups hold right and wrong answers, so that a step of it costs up to three of GRPO's.
Two arms are compared after as many rollouts (at the end of both) or after as many groups drawn: at the smaller of the
two totals, on the line between the neighbouring evaluations.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.routing_replay.branches import interval, pack
from jaxrl_llm.reporting.read import Run, Study, load
from jaxrl_llm.reporting.statistics import paired_difference
from jaxrl_llm.reporting.style import INK, label_ends, line, panels

SECOND = 5  # the first seed of the second batch
COMPARED = [
    ("GRPO+R2", "GRPO", "rollouts"),
    ("GSPO", "GRPO", "rollouts"),
    ("DAPO", "GRPO", "rollouts"),
    ("DAPO", "GRPO", "groups"),
    ("DAPO", "GRPO, 96 prompts", "groups"),
    ("GRPO, 96 prompts", "GRPO", "groups"),
]


def course(run: Run) -> dict[str, np.ndarray]:
    """Of every evaluation: the rollouts before it, the groups drawn in them, and held-out sampled accuracy."""
    steps, accuracy = run.series("eval/pass_at_1")
    drawn = np.concatenate([[0.0], np.cumsum(run.series("rollout/groups_generated")[1])])
    return {"rollouts": steps, "groups": drawn[steps.astype(int)], "accuracy": accuracy}


def pair(one: Run, other: Run, budget: str) -> list[float]:
    """What two runs came to after as many "rollouts" or "groups", the most that both have."""
    courses = [course(one), course(other)]
    common = min(each[budget][-1] for each in courses)
    return [float(np.interp(common, each[budget], each["accuracy"])) for each in courses]


def ended(study: Study) -> dict[str, list[Run]]:
    """The ended runs of every arm that has some."""
    runs = {arm: [run for run in study.select(arm, "") if run.ended] for arm in study.arms}
    return {arm: own for arm, own in runs.items() if own}


def ends(study: Study) -> list[list[str]]:
    """Arm, runs, groups drawn and trained on a rollout, held-out sampled accuracy from the start to the end."""
    rows = []
    for arm, runs in ended(study).items():
        groups = [np.mean([run.average(f"rollout/groups_{name}") for run in runs]) for name in ("generated", "kept")]
        start, end = (np.mean([run.value("eval/pass_at_1", at=at) for run in runs]) for at in (0, -1))
        rows.append([arm, str(len(runs)), *(f"{number:.0f}" for number in groups), f"{start:.3f} -> {end:.3f}"])
    return rows


def differences(study: Study) -> list[list[str]]:
    """Arm, against, after as many, accuracy of both, difference, detectable, and the difference in the two batches."""
    rows, runs = [], ended(study)
    for arm, other, budget in COMPARED:
        theirs = {run.seed: run for run in runs.get(other, [])}
        ours = [run for run in runs.get(arm, []) if run.seed in theirs]
        if not ours:
            continue
        left, right = np.array([pair(run, theirs[run.seed], budget) for run in ours]).reshape(-1, 2).T
        seeds = np.array([int(run.seed) for run in ours])
        parts = [paired_difference(left[own], right[own]) for own in (seeds >= 0, seeds < SECOND, seeds >= SECOND)]
        told = [interval(part) for part in parts]
        values = f"{right.mean():.3f}, {left.mean():.3f}"
        rows.append([arm, other, budget, values, told[0], f"{parts[0].detectable:.3f}", *told[1:]])
    return rows


def figure(study: Study) -> Figure:
    """Held-out accuracy against rollouts and against groups drawn: means of the runs at each evaluation."""
    budgets = ("rollouts", "groups")
    drawn, axes = panels([f"held-out sampled accuracy, by {budget}" for budget in budgets], columns=2, height=4.0)
    for ax, budget in zip(axes, budgets, strict=True):
        places = []
        for arm, runs in ended(study).items():
            courses = [course(run) for run in runs]
            x, y = (np.mean([each[name] for each in courses], 0) for name in (budget, "accuracy"))
            look = line(study.arms, arm)
            ax.plot(x, y, **look)
            places.append((float(x[-1]), float(y[-1]), arm, look["color"]))
        ax.set_xlabel({"rollouts": "rollouts", "groups": "groups drawn"}[budget], fontsize=8.5, color=INK)
        label_ends(ax, places)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--pack", type=Path)
    given = parser.parse_args()
    study = load(given.dir)
    for rows in (ends(study), differences(study)):
        print("".join(f"| {' | '.join(cells)} |\n" for cells in rows))
    if given.figure:
        figure(study).savefig(given.figure)
    if given.pack:
        pack(given.dir, given.pack, "metrics.jsonl")


if __name__ == "__main__":
    main()
