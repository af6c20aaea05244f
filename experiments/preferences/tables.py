"""The tables of this page from the DIRs of its sweeps, and their data in small.

python -m experiments.preferences.tables runs/preferences/methods              # prints Markdown
python -m experiments.preferences.tables runs/preferences/* --pack OUT.tar.xz  # sweep.json, configs and metrics
"""

import argparse
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.report.read import Run, Study, load
from jaxrl_llm.report.statistics import PairedDifference, paired_difference

__all__ = ["change_table", "model_table", "over_table"]

KEPT = ("sweep.json", "config.json", "metrics.jsonl", "result.json")
OUTCOMES = {"greedy": "eval/greedy", "sampled": "eval/pass_at_1"}


def _told(d: PairedDifference) -> str:
    return f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ends(runs: Sequence[Run], key: str) -> dict[str, float]:
    return {run.seed: run.value(key) for run in runs if run.finished}


def change_table(study: Study) -> list[list[str]]:
    """Arm, held-out accuracy, start -> end, change, that of each batch of seeds, difference of the end to the baseline.

    A batch is the seeds that ran at one commit.
    """
    rows = []
    for arm in study.arms:
        runs = [run for run in study.select(arm, "") if run.finished]
        for name, key in OUTCOMES.items():
            changes = {run: (run.value(key, at=0), run.value(key)) for run in runs}
            start, end = zip(*changes.values(), strict=True)
            cells = [arm, name, f"{_mean(start):.3f} -> {_mean(end):.3f}", _told(paired_difference(end, start))]
            for batch in dict.fromkeys(run.batch for run in runs):
                own = [both for run, both in changes.items() if run.batch == batch]
                cells.append(_told(paired_difference([b for _, b in own], [a for a, _ in own])))
            base = _ends(study.select(study.baseline, ""), key)
            paired = paired_difference(end, [base[run.seed] for run in runs])
            rows.append([*cells, "" if arm == study.baseline else _told(paired)])
    return rows


def model_table(study: Study) -> list[list[str]]:
    """Arm, and of the held-out pairs: ordered right (range over seeds), Brier score, calibration error."""
    rows = []
    for arm in study.arms:
        runs = [run for run in study.select(arm, "") if run.finished]
        right, brier, error = (
            list(_ends(runs, f"eval/{key}").values()) for key in ("pair_accuracy", "brier", "calibration_error")
        )
        shown = f"{_mean(right):.3f} ({min(right):.3f} to {max(right):.3f})"
        rows.append([arm, shown, f"{_mean(brier):.3f}", f"{_mean(error):.3f}"])
    return rows


def over_table(study: Study, last: int = 10) -> list[list[str]]:
    """Arm, and of the last rollouts: KL to the start (nats an answer), change of the model's score and of the true
    reward since the first rollouts."""
    rows = []
    for arm in study.arms:
        runs = [run for run in study.select(arm, "") if run.finished and run.series("reward/reward_model")[0].size]
        if not runs:
            continue
        cells = [arm, f"{_mean([run.average('kl/ref_answer', last) for run in runs]):.2f}"]
        for key in ("reward/reward_model", "reward/mean"):
            first = [float(run.series(key)[1][:last].mean()) for run in runs]
            end = [run.average(key, last) for run in runs]
            cells += [f"{_mean(first):.3f} -> {_mean(end):.3f}", _told(paired_difference(end, first))]
        rows.append(cells)
    return rows


def pack(folders: Sequence[Path], archive: Path) -> None:
    """Data that the tables read; the files of configs are named from here, not from the root of this machine."""
    with tarfile.open(archive, "w:xz") as packed:
        for folder in folders:
            for path in sorted(p for name in KEPT for p in folder.rglob(name)):
                content = path.read_bytes().replace(f"{Path.cwd()}/".encode(), b"")
                info = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder)}")
                info.size = len(content)
                packed.addfile(info, io.BytesIO(content))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dirs", type=Path, nargs="+")
    parser.add_argument("--pack", type=Path)
    given = parser.parse_args()
    for folder in given.dirs:
        study = load(folder)
        evaluated = {key for run in study.runs for row in run.rows for key in row}
        tables = [model_table] if "eval/greedy" not in evaluated else [change_table]
        tables += [over_table] if "kl/ref_answer" in evaluated else []
        for table in tables:
            print(f"{folder.name}\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in table(study)))
    if given.pack:
        pack(given.dirs, given.pack)


if __name__ == "__main__":
    main()
