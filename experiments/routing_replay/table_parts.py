"""Parts that the tables of this page share: the outcome, its words, the packed data and the command line."""

import argparse
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from jaxrl_llm.records.run_log import read_rows
from jaxrl_llm.report.comparisons import OUTCOMES
from jaxrl_llm.report.read import Run, Study, load
from jaxrl_llm.report.statistics import PairedDifference, paired_difference

SAMPLED = next(outcome for outcome in OUTCOMES if outcome.name == "held-out sampled, end")
KEPT = (
    "eval/greedy",
    "eval/pass_at_1",
    "eval/sampler_",
    "clip/",
    "kl/",
    "ratio/token_var",
    "gradient_weight/",
    "mismatch/mean",
    "mismatch/above_2",
)
KEPT_ROUTING = ("share_of_variance", "log_ratio_", "part_", "kl_fresh", "flips_fresh", "flips_old_current")
KEPT_ROUTING += ("flips_sampler_old",)
Table = list[list[str]]


def interval(d: PairedDifference) -> str:
    """+0.065 [+0.043, +0.086]."""
    return f"{SAMPLED.signed(d.mean)} {SAMPLED.interval(d.low, d.high)}"


def start_to_end(runs: Sequence[Run]) -> str:
    """0.877 -> 0.882: held-out sampled accuracy; a run that diverged ends at 0."""
    start, end = (np.mean([measure(run) for run in runs]) for measure in (start_of, SAMPLED.measure))
    return f"{start:.3f} -> {end:.3f}"


def start_of(run: Run) -> float:
    """Held-out sampled accuracy before the first rollout."""
    return run.value("eval/pass_at_1", at=0)


def gain(run: Run) -> float:
    """Held-out sampled accuracy, from the start to the end."""
    return SAMPLED.measure(run) - start_of(run)


def collapsed(runs: Sequence[Run]) -> str:
    """1 of 10."""
    return f"{sum(run.collapse()[1] for run in runs)} of {len(runs)}"


def same_states(
    ours: Iterable[Run], theirs: Iterable[Run], measure: Callable[[Run], float], first: int = 0
) -> PairedDifference:
    """Pairs of two sets of branches, over the states from `first` on that both have, by trajectory."""
    left, right = ({(run.seed, run.branch): run for run in runs} for runs in (ours, theirs))
    both = [state for state in right if state in left and int(state[1]) >= first]
    one, other = ([measure(runs[state]) for state in both] for runs in (left, right))
    return paired_difference(one, other, [seed for seed, _ in both])


def mean(runs: Sequence[Run], key: str, last: int = 0) -> float:
    """Over the runs that have the number, of its mean over all rows or over the last ones."""
    values = [run.average(key, last=last) for run in runs]
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def share_of_variance(runs: Sequence[Run]) -> tuple[float, float, float, float]:
    """Share of Var(log r) that the changed experts explain: by variance, its 95 % interval over seeds, the median.

    The interval is a percentile bootstrap that draws whole seeds; at five of them it is too narrow, and one has none.
    NaN where nothing was measured.
    """
    sums: dict[str, np.ndarray] = {}
    single = []
    for run in runs:
        variance, share = (run.series(f"routing/{name}")[1] for name in ("log_ratio_var", "share_of_variance"))
        known = np.isfinite(variance) & (variance > 0)
        if known.any():
            part = np.array([(variance * share)[known].sum(), variance[known].sum()])
            sums[run.seed] = sums.get(run.seed, 0) + part
            single += share[known].tolist()
    if not sums:
        return float("nan"), float("nan"), float("nan"), float("nan")

    def ratio(explained: np.ndarray, variance: np.ndarray, axis: int = -1) -> np.ndarray:
        return explained.sum(axis) / variance.sum(axis)

    per_seed = np.array(list(sums.values())).T
    low = high = float("nan")
    if per_seed.shape[1] > 1:
        drawn = stats.bootstrap(per_seed, ratio, paired=True, method="percentile", rng=np.random.default_rng(0))
        low, high = drawn.confidence_interval
    return float(ratio(*per_seed)), float(low), float(high), float(np.median(single))


def told_share(runs: Sequence[Run]) -> list[str]:
    """11 % [6, 16] and the median."""
    share, low, high, middle = (100 * x for x in share_of_variance(runs))
    return [f"{share:.0f} % [{low:.0f}, {high:.0f}]", f"{middle:.0f} %"]


def markdown(rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def unpacked(archive: Path, name: str, folder: Path) -> Study:
    """The sweep `name` of an archive, unpacked in `folder`."""
    with tarfile.open(archive) as packed:
        members = [m for m in packed if m.name.startswith(f"{name}/") and not m.name.endswith(".png")]
        packed.extractall(folder, members, filter="data")
    return load(folder / name)


def command(
    tables: Callable[[Study, argparse.Namespace], Iterable[Table]],
    figure: Callable[[Study], Figure] | None = None,
    parser: argparse.ArgumentParser | None = None,
) -> None:
    """DIR [--figure OUT.png] [--pack OUT.tar.xz] and the options of `parser`: prints the tables of the sweep in DIR."""
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    if figure is not None:
        parser.add_argument("--figure", type=Path)
    parser.add_argument("--pack", type=Path)
    given = parser.parse_args()
    study = load(given.dir)
    print("\n".join(markdown(table) for table in tables(study, given)), end="")
    if figure is not None and given.figure:
        figure(study).savefig(given.figure)
    if given.pack:
        pack(given.dir, given.pack, "branches.jsonl" if study.branching else "metrics.jsonl")


def pack(folder: Path, archive: Path, rows: str) -> None:
    """The sweep with what the report and the tables read of its files of rows."""
    with tarfile.open(archive, "w:xz") as packed:

        def add(name: str, content: bytes) -> None:
            info = tarfile.TarInfo(f"{folder.name}/{name}")
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))

        for kept in (folder / "sweep.json", *sorted(folder.glob("changes-*.diff"))):
            add(kept.name, kept.read_bytes())
        for path in sorted(folder.rglob(rows)):
            place = path.parent.relative_to(folder)
            lines = [json.dumps({key: x for key, x in row.items() if _kept(key)}) + "\n" for row in read_rows(path)]
            add(f"{place}/{rows}", "".join(lines).encode())
            for name in ("config.json", "result.json", "failed.json"):
                if (path.parent / name).exists():  # a config's file is named from here, not from this machine's root
                    content = (path.parent / name).read_bytes()
                    add(f"{place}/{name}", content.replace(f"{Path.cwd()}/".encode(), b""))


def _kept(key: str) -> bool:
    routed = key.startswith(tuple(f"routing/{name}" for name in KEPT_ROUTING)) and "_by_" not in key
    named = key in ("state", "arm", "step", "failed", "reward/mean", "entropy")
    return named or key.startswith((*KEPT, "rollout/groups_")) or routed
