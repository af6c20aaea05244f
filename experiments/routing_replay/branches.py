"""The tables and the figure of a sweep of branches for this page, and its data in small.

    python -m experiments.routing_replay.branches runs/routing_replay/branch [--second 4]     # prints Markdown
    python -m experiments.routing_replay.branches runs/routing_replay/tight --second 16 --baseline GSPO
    python -m experiments.routing_replay.branches runs/routing_replay/branch --figure OUT.png
    python -m experiments.routing_replay.branches runs/routing_replay/branch --pack OUT.tar.xz

The packed sweep is what the report reads, with the evaluations, the clipped shares and the routing of every branch.
"""

import argparse
import dataclasses
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from jaxrl_llm.reporting.comparisons import OUTCOMES
from jaxrl_llm.reporting.read import CLIPPED, Run, Study, load
from jaxrl_llm.reporting.statistics import MINIMUM_SEEDS, PairedDifference, paired_difference
from jaxrl_llm.reporting.style import INK, colour, label_ends, panels
from jaxrl_llm.run_log import read_rows

SAMPLED = next(outcome for outcome in OUTCOMES if outcome.name == "held-out sampled, end")
KEPT = (
    "eval/greedy",
    "eval/pass_at_1",
    "clip/",
    "kl/",
    "ratio/token_var",
    "gradient_weight/",
    "mismatch/mean",
    "rollout/groups_",
)
KEPT_ROUTING = ("share_of_variance", "log_ratio_var", "part_", "flips_fresh", "flips_old_current", "flips_sampler_old")


def differences(study: Study, arm: str, condition: str) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """What the branches of an arm and of the baseline came to, pair by pair, and the trajectory (seed) of each pair."""
    theirs = {(run.seed, run.branch): run for run in study.select(study.baseline, condition) if run.ended}
    ours = [run for run in study.select(arm, condition) if run.ended]
    values = [[SAMPLED.measure(run) for run in (one, theirs[one.seed, one.branch])] for one in ours]
    left, right = np.array(values, np.float64).reshape(-1, 2).T
    return left, right, [int(run.seed) for run in ours]


def difference(study: Study, arm: str, condition: str, first: int = 0, last: float = np.inf) -> PairedDifference:
    """The difference to the baseline over the trajectories of the seeds from `first` to below `last`."""
    left, right, seeds = differences(study, arm, condition)
    own = (np.array(seeds) >= first) & (np.array(seeds) < last)
    return paired_difference(left[own], right[own], np.array(seeds)[own].tolist())


def by_trajectory(study: Study, arm: str, condition: str) -> list[float]:
    """The mean difference of each trajectory."""
    left, right, seeds = differences(study, arm, condition)
    return [float(np.mean((left - right)[np.array(seeds) == seed])) for seed in dict.fromkeys(seeds)]


def mean(runs: Sequence[Run], key: str) -> float:
    values = [run.average(key) for run in runs]
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def shares_of_variance(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Var(log r) of the branches in which it was measured and not 0, and the share of it that routing explains."""
    measured = np.array([(run.value("routing/log_ratio_var"), run.value("routing/share_of_variance")) for run in runs])
    measured = measured.reshape(-1, 2)
    return tuple(measured[measured[:, 0] > 0].T)


def table(study: Study, second: int | None = None) -> list[list[str]]:
    """Condition, arm, states, tokens clipped, difference with interval, detectable, and the two batches.

    second: the first seed of the second batch; None: there is one batch.

    Under the number of trajectories that a verdict takes, the mean of each stands in the place of an interval.
    """
    rows = []
    for condition in study.conditions:
        for arm in study.arms:
            runs = study.select(arm, condition)
            if not runs:
                continue
            clipped = mean(runs, CLIPPED)
            cells = [condition, arm, str(len(runs)), f"{clipped * 100:.1f} %"]
            if arm == study.baseline:
                start, end = (float(np.mean([run.value("eval/pass_at_1", at=at) for run in runs])) for at in (0, -1))
                rows.append([*cells, f"({start:.3f} -> {end:.3f})", "", "", ""])
                continue
            whole = difference(study, arm, condition)
            if whole.n < MINIMUM_SEEDS:
                each = ", ".join(SAMPLED.signed(one) for one in by_trajectory(study, arm, condition))
                rows.append([*cells, f"{SAMPLED.signed(whole.mean)} ({each})", "", "", ""])
                continue
            parts = [] if second is None else [(0, second), (second, np.inf)]
            told = [interval(difference(study, arm, condition, *part)) for part in parts] or ["", ""]
            rows.append([*cells, interval(whole), f"{whole.detectable:.3f}", *told])
    return rows


def interval(d: PairedDifference) -> str:
    """+0.065 [+0.043, +0.086]."""
    return f"{SAMPLED.signed(d.mean)} {SAMPLED.interval(d.low, d.high)}"


def matrix(study: Study) -> list[list[str]]:
    """A header, and of each condition the states, the baseline before and after, every arm's difference, detectable.

    Detectable is the largest of the row's arms.
    """
    rows = [["condition", "states", f"{study.baseline}, before -> after", *study.arms[1:], "detectable"]]
    for condition in study.conditions:
        runs = study.select(study.baseline, condition)
        start, end = (float(np.mean([run.value("eval/pass_at_1", at=at) for run in runs])) for at in (0, -1))
        found = {arm: difference(study, arm, condition) for arm in study.arms[1:] if study.select(arm, condition)}
        cells = [interval(found[arm]) if arm in found else "" for arm in study.arms[1:]]
        largest = max(d.detectable for d in found.values())
        rows.append([condition, str(len(runs)), f"{start:.3f} -> {end:.3f}", *cells, f"{largest:.3f}"])
    return rows


def routing(study: Study) -> list[list[str]]:
    """Condition, arm, experts changed, share of routing by variance, median, Var(log r), tails of the routing part."""
    rows = []
    for condition in study.conditions:
        for arm in study.arms:
            runs = [run for run in study.select(arm, condition) if run.series("routing/log_ratio_var")[0].size]
            if not runs:
                continue
            weights, shares = shares_of_variance(runs)
            tails = [f"{mean(runs, f'routing/part_above_{name}'):.2%}".replace("%", " %") for name in ("0.2", "ln2")]
            share = np.average(shares, weights=weights) if len(shares) else np.nan
            shown = [f"{share * 100:.0f} %", f"{np.median(shares) * 100:.0f} %", f"{weights.mean():.2g}"]
            changed = f"{mean(runs, 'routing/flips_fresh') * 100:.1f} %"
            rows.append([condition, arm, str(len(runs)), changed, *shown, *tails])
    return rows


def figure(study: Study) -> Figure:
    """Difference to the baseline against the share of tokens clipped, one panel a condition; small: each trajectory."""
    drawn, axes = panels(
        [f"{one}: {SAMPLED.name}, difference to {study.baseline}" for one in study.conditions], columns=2, height=3.6
    )
    for ax, condition in zip(axes, study.conditions, strict=True):
        places = []
        for arm in study.arms[1:]:
            ink, x = colour(study.arms, arm), 100 * mean(study.select(arm, condition), CLIPPED)
            each = by_trajectory(study, arm, condition)
            ax.plot([x] * len(each), each, "o", color=ink, markersize=3.5, alpha=0.5)
            ax.plot(x, np.mean(each), "o", color=ink, markersize=8)
            places.append((100.0, float(np.mean(each)), f"{arm}  {np.mean(each):+.3f}", ink))
        ax.axhline(0, color=INK, linewidth=0.8)
        ax.set_xlabel("tokens clipped (%)", fontsize=8.5, color=INK)
        label_ends(ax, places)
    return drawn


def pack(folder: Path, archive: Path, rows: str = "branches.jsonl") -> None:
    """The sweep with what the tables read of its files of rows."""
    with tarfile.open(archive, "w:xz") as packed:

        def add(name: str, content: bytes) -> None:
            info = tarfile.TarInfo(f"{folder.name}/{name}")
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))

        add("sweep.json", (folder / "sweep.json").read_bytes())
        for path in sorted(folder.rglob(rows)):
            place = path.parent.relative_to(folder)
            lines = [json.dumps({key: x for key, x in row.items() if _kept(key)}) + "\n" for row in read_rows(path)]
            add(f"{place}/{rows}", "".join(lines).encode())
            for name in ("config.json", "result.json"):
                if (path.parent / name).exists():  # a config's file is named from here, not from this machine's root
                    content = (path.parent / name).read_bytes()
                    add(f"{place}/{name}", content.replace(f"{Path.cwd()}/".encode(), b""))


def _kept(key: str) -> bool:
    routed = key.startswith(tuple(f"routing/{name}" for name in KEPT_ROUTING)) and "by_layer" not in key
    return key in ("state", "arm", "step", "failed", "reward/mean", "entropy") or key.startswith(KEPT) or routed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--second", type=int, help="the first seed of the second batch")
    parser.add_argument("--baseline", help="the arm that the differences are to; default: the sweep's")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--pack", type=Path)
    given = parser.parse_args()
    study = load(given.dir)
    study = dataclasses.replace(study, baseline=given.baseline or study.baseline)
    for rows in (table(study, given.second), matrix(study), routing(study)):
        print("".join(f"| {' | '.join(cells)} |\n" for cells in rows))
    if given.figure:
        figure(study).savefig(given.figure)
    if given.pack:
        pack(given.dir, given.pack)


if __name__ == "__main__":
    main()
