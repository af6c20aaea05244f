"""Before and after training: held-out accuracy by arm, minutes, and readable answers.

python -m experiments.real_model.before_after runs/real_model
"""

import argparse
from pathlib import Path

import numpy as np

from jaxrl_llm.report.read import Run, load
from jaxrl_llm.report.statistics import paired_difference

__all__ = ["accuracies", "answers"]

_PROMPTS = 8  # held-out prompts shown


def accuracies(runs: list[Run]) -> str:
    """One row an arm: means over seeds, and the gain with its 95 % paired-t interval over seeds."""
    lines = [
        "| arm | seeds | greedy, before -> after | gain | sampled, before -> after | gain | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(run.arm for run in runs):
        own = [run for run in runs if run.arm == arm]
        cells = [_gain(own, key) for key in ("eval/greedy", "eval/pass_at_1")]
        seconds = np.mean([sum(run.series(f"time/{part}_s")[1].sum() for part in ("rollout", "update")) for run in own])
        lines.append(f"| {arm} | {len(own)} | {' | '.join(cells)} | {seconds / 60:.1f} |")
    return "\n".join(lines)


def _gain(runs: list[Run], key: str) -> str:
    before, after = ([run.value(key, at=at) for run in runs] for at in (0, -1))
    gain = paired_difference(after, before)
    interval = f" [{gain.low:+.3f}, {gain.high:+.3f}]" if gain.n > 1 else ""
    return f"{np.mean(before):.3f} -> {np.mean(after):.3f} | {gain.mean:+.3f}{interval}"


def answers(run: Run) -> str:
    """The greedy answers to the same held-out prompts before the first update and after the last."""
    rows = [row for row in run.samples if row.get("split") == "test"]
    first, last = ([row for row in rows if row["step"] == step] for step in (0, max(row["step"] for row in rows)))
    after = {row["prompt"]: row for row in last}
    lines = [f"{run.label}: greedy answers", "", "| prompt | before | | after | |", "|---|---|---|---|---|"]
    for row in first[:_PROMPTS]:
        other = after[row["prompt"]]
        cells = [f"`{one['greedy']!r}` | {'right' if one['reward'] else 'wrong'}" for one in (row, other)]
        lines.append(f"| `{row['prompt']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="DIR of the sweep")
    runs = [run for run in load(parser.parse_args().folder).runs if run.finished]
    print(accuracies(runs), answers(runs[0]), sep="\n\n")


if __name__ == "__main__":
    main()
