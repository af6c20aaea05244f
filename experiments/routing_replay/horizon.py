"""The long runs of `horizon`: their ends, and arms compared after as many groups drawn; tables and figure of this page.

    python -m experiments.routing_replay.horizon runs/routing_replay/horizon                  # prints Markdown
    python -m experiments.routing_replay.horizon runs/routing_replay/horizon --figure OUT.png --pack OUT.tar.xz

DAPO draws rollouts until enough groups hold right and wrong answers, so that a step of it costs up to three of GRPO's.
Two arms are compared after as many rollouts (at the end of both) or after as many groups drawn: at the smaller of the
two totals, on the line between the neighbouring evaluations.
"""

import numpy as np
from matplotlib.figure import Figure

from experiments.routing_replay.pooled import Pooled, pooled
from experiments.routing_replay.pooled import table as pooled_table
from experiments.routing_replay.table_parts import Table, command, mean, start_to_end
from jaxrl_llm.report.read import Run, Study
from jaxrl_llm.report.style import INK, label_ends, line, panels

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
    """Return for every evaluation the rollouts before it, the groups drawn in them, and held-out sampled accuracy.

    A run that diverged ends at an accuracy of 0.
    """
    steps, accuracy = run.series("eval/pass_at_1")
    logged, groups = run.series("rollout/groups_generated")
    if run.diverged:
        steps, accuracy = np.append(steps, logged[-1]), np.append(accuracy, 0.0)
    drawn = np.interp(steps, np.append(0, logged), np.append(0, np.cumsum(groups)))
    return {"rollouts": steps, "groups": drawn, "accuracy": accuracy}


def pair(one: Run, other: Run, budget: str) -> list[float]:
    """Return what two runs came to after as many "rollouts" or "groups", the most that both have."""
    courses = [course(one), course(other)]
    common = min(own[budget][-1] for own in courses)
    return [float(np.interp(common, own[budget], own["accuracy"])) for own in courses]


def ended(study: Study) -> dict[str, list[Run]]:
    """The ended runs of every arm that has some."""
    runs = {arm: [run for run in study.select(arm, "") if run.ended] for arm in study.arms}
    return {arm: own for arm, own in runs.items() if own}


def ends(study: Study) -> Table:
    """Arm, runs, groups drawn and trained on a rollout, held-out sampled accuracy from the start to the end."""
    return [
        [
            arm,
            str(len(runs)),
            *(f"{mean(runs, f'rollout/groups_{name}'):.0f}" for name in ("generated", "kept")),
            start_to_end(runs),
        ]
        for arm, runs in ended(study).items()
    ]


def compared(study: Study) -> list[Pooled]:
    """Every comparison of two arms; labels: arm, against, after as many, the accuracy of the second and the first."""
    found, runs = [], ended(study)
    for arm, other, budget in COMPARED:
        theirs = {run.seed: run for run in runs.get(other, [])}
        ours = [run for run in runs.get(arm, []) if run.seed in theirs]
        if not ours:
            continue
        left, right = np.array([pair(run, theirs[run.seed], budget) for run in ours]).reshape(-1, 2).T
        seeds = np.array([int(run.seed) for run in ours])
        parts = {f"seeds below {SECOND}": seeds < SECOND, f"seeds from {SECOND}": seeds >= SECOND}
        batches = {name: (left - right)[own] for name, own in parts.items() if own.any()}
        found.append(pooled([arm, other, budget, f"{right.mean():.3f}, {left.mean():.3f}"], batches))
    return found


def figure(study: Study) -> Figure:
    """Held-out accuracy against rollouts and against groups drawn: means of the runs at each evaluation."""
    budgets = ("rollouts", "groups")
    drawn, axes = panels([f"held-out sampled accuracy, by {budget}" for budget in budgets], columns=2, height=4.0)
    for ax, budget in zip(axes, budgets, strict=True):
        places = []
        for arm, runs in ended(study).items():
            courses = [course(run) for run in runs]
            steps = max((own["rollouts"] for own in courses), key=len)
            measured = {
                name: np.mean([np.interp(steps, own["rollouts"], own[name]) for own in courses], 0)
                for name in courses[0]
            }
            x, y = measured[budget], measured["accuracy"]
            look = line(study.arms, arm)
            ax.plot(x, y, **look)
            places.append((float(y[-1]), arm, look["color"]))
        ax.set_xlabel({"rollouts": "rollouts", "groups": "groups drawn"}[budget], fontsize=8.5, color=INK)
        label_ends(ax, places)
    return drawn


if __name__ == "__main__":
    command(lambda study, _: [ends(study), pooled_table(compared(study))], figure)
