"""Tables and figure of this page from the DIRs of its sweeps, whose curves are kept small in results/curves.json.

python -m experiments.distillation.tables                                    # prints the tables
python -m experiments.distillation.tables --read runs/distillation/compare --teacher 0.903   # writes results/
python -m experiments.distillation.tables --read runs/distillation/sparse --teacher 0.827
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.distillation.sweep import METHODS
from jaxrl_llm.report.read import load
from jaxrl_llm.report.statistics import PairedDifference, paired_difference

RESULTS = Path(__file__).parent / "results"
METRIC = "eval/pass_at_1"
PAIRS = {  # by sweep
    "compare": {"D1": ("sampled", "GRPO"), "D2": ("exact", "sampled"), "D4": ("one penalty", "sampled")},
    "sparse": {"S1": ("sampled", "GRPO"), "S2": ("exact", "GRPO"), "S3": ("exact", "sampled")},
    "longer": {"L1": ("exact", "GRPO")},
    "further": {"L3": ("exact", "GRPO")},
}
Curves = Mapping[str, Mapping[str, list[list[float]]]]  # {arm: {seed: [[step, accuracy], ...]}}


def read(folder: str | Path) -> dict[str, dict[str, Any]]:
    """The curves of a sweep's finished runs."""
    study = load(folder)
    out: dict[str, dict[str, Any]] = {}
    for arm in study.arms:
        for run in study.select(arm, ""):
            if run.finished:
                steps, values = run.series(METRIC)
                out.setdefault(arm, {})[run.seed] = [
                    [int(s), round(float(v), 5)] for s, v in zip(steps, values, strict=True)
                ]
    return out


def at(curves: Curves, arm: str, share: float = 1) -> np.ndarray:
    """Accuracy by seed, in the order of seeds, after this share of the rollouts."""
    return np.asarray([points[round(share * (len(points) - 1))][1] for _, points in sorted(curves[arm].items())])


def difference(curves: Curves, arm: str, other: str, share: float = 1) -> PairedDifference:
    return paired_difference(at(curves, arm, share), at(curves, other, share))


def told(d: PairedDifference) -> str:
    return f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"


def arm_table(curves: Curves) -> list[str]:
    """Method, seeds, accuracy at the start, half way and at the end, and the last two minus GRPO's."""
    rows = ["| method | seeds | start | half way | minus GRPO's | end | minus GRPO's |", "| -- " * 7 + "|"]
    for arm, runs in curves.items():
        cells = [f"{at(curves, arm, 0).mean():.3f}"]
        for share in (0.5, 1):
            own = "" if arm == "GRPO" else told(difference(curves, arm, "GRPO", share))
            cells += [f"{at(curves, arm, share).mean():.3f}", own]
        rows.append(f"| {arm} | {len(runs)} | {' | '.join(cells)} |")
    return rows


def hypothesis_table(curves: Curves, pairs: Mapping[str, tuple[str, str]]) -> list[str]:
    """Hypothesis, what is compared at the end, the difference and the least detectable one."""
    rows = ["| hypothesis | difference at the end | detectable |", "| -- | -- | -- |"]
    for name, (arm, other) in pairs.items():
        d = difference(curves, arm, other)
        rows.append(f"| {name}: {arm} minus {other} | {told(d)} | {d.detectable:.3f} |")
    return rows


def figure(sweeps: Mapping[str, Any], path: Path) -> None:
    """Accuracy by rollout in each sweep: the mean over seeds, and every seed behind it."""
    import matplotlib.pyplot as plt

    fig, panels = plt.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
    for axes, (name, of) in zip(panels.flat, sweeps.items(), strict=True):
        for place, arm in enumerate(METHODS):
            if arm in of["curves"]:
                points = np.asarray([own for _, own in sorted(of["curves"][arm].items())])
                axes.plot(points[0, :, 0], points[:, :, 1].T, color=f"C{place}", lw=0.7, alpha=0.35)
                axes.plot(points[0, :, 0], points[:, :, 1].mean(0), color=f"C{place}", lw=2, label=arm)
        axes.set_title(f"{name} (teacher {of['teacher']:.3f})")
        axes.set_ylim(bottom=0)
    fig.supxlabel("rollouts of 256 answers")
    fig.supylabel("held-out sampled accuracy")
    panels[0, 0].legend(frameon=False)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=Path, help="folder of the sweep: .../compare or .../sparse")
    parser.add_argument("--teacher", type=float, help="held-out sampled accuracy of the teacher, with --read")
    given = parser.parse_args()
    stored = RESULTS / "curves.json"
    found = json.loads(stored.read_text())
    if given.read:
        found[given.read.name] = {"teacher": given.teacher, "curves": read(given.read)}
        stored.write_text(json.dumps(found) + "\n")
    for name, pairs in PAIRS.items():
        curves = found[name]["curves"]
        print("\n".join([name, *arm_table(curves), "", *hypothesis_table(curves, pairs), ""]))
    if given.read:
        figure({name: found[name] for name in PAIRS}, RESULTS / "curves.png")


if __name__ == "__main__":
    main()
