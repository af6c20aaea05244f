"""Every table of this page that rests on the committed data, as it stands there.

    python -m experiments.routing_replay.tables                 # all of them, in Markdown
    python -m experiments.routing_replay.tables seeds branch    # of these archives

Only the doses of router noise are not among them: `noise.py` measures those anew.
"""

import argparse
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from experiments.routing_replay import branches, dose, rates
from jaxrl_llm.reporting.comparisons import batch_table, compare
from jaxrl_llm.reporting.read import CLIPPED, Run, Study, load
from jaxrl_llm.reporting.tables import routing_table

RESULTS = Path(__file__).with_name("results")
Table = list[list[str]]


def full(study: Study) -> Table:
    """Arm; at each N held-out sampled accuracy at the end and the difference to GRPO."""
    rows = [[arm] for arm in study.arms]
    for condition in study.conditions:
        found = _differences(study, condition)
        for row in rows:
            row += [f"{_mean(study.select(row[0], condition), 'eval/pass_at_1', last=1):.3f}", found.get(row[0], "")]
    return rows


def seeds(study: Study) -> Table:
    """Arm, greedy from start to end, sampled, reward, clipped, experts changed, collapsed."""
    return [
        [
            arm,
            " -> ".join(f"{np.mean([run.value('eval/greedy', at=at) for run in runs]):.3f}" for at in (0, -1)),
            *(f"{_mean(runs, key, last):.3f}" for key, last in (("eval/pass_at_1", 1), ("reward/mean", 5))),
            f"{100 * _mean(runs, CLIPPED):.1f} %",
            f"{100 * _mean(runs, 'routing/flips_old_current'):.1f} %",
            f"{sum(run.collapse()[1] for run in runs)} of {len(runs)}",
        ]
        for arm, runs in _arms(study)
    ]


def batches(study: Study) -> Table:
    """Outcome, arm, the difference in both batches, what they say together, p that they have one mean."""
    both = {}
    for c in compare(study, ""):
        (_, first), (_, second) = c.batches
        sides = {1 if d.low > 0 else -1 if d.high < 0 else 0 for d in (first, second)}
        claim = {1: "higher", -1: "lower"}.get(sides.pop(), "estimate") if len(sides) == 1 else "estimate"
        both[c.outcome.name, c.arm] = "does not replicate" if c.batches_p < 0.05 else claim
    return [
        [outcome, arm, *(cell.split(" (")[0] for cell in cells), both[outcome, arm], p]
        for outcome, arm, *cells, p in batch_table(study, "")[1]
        if outcome != "rollouts without collapse"
    ]


def mismatch(study: Study) -> Table:
    """Arm, greedy and sampled at the end, difference in the latter, verdict, k3 and experts from sampler to old."""
    verdicts = {c.arm: c.verdict for c in compare(study, "") if c.outcome == branches.SAMPLED}
    found = _differences(study, "")
    return [
        [
            arm,
            *(f"{_mean(runs, f'eval/{name}', last=1):.3f}" for name in ("greedy", "pass_at_1")),
            found.get(arm, ""),
            verdicts.get(arm, ""),
            f"{_mean(runs, 'kl/sampler'):.1e}",
            f"{100 * _mean(runs, 'routing/flips_sampler_old'):.2f} %",
        ]
        for arm, runs in _arms(study)
    ]


def what(study: Study) -> Table:
    """Arm, sampled at the end, difference, collapsed."""
    found = _differences(study, "")
    return [
        [
            arm,
            f"{_mean(runs, 'eval/pass_at_1', last=1):.3f}",
            found.get(arm, ""),
            f"{sum(run.collapse()[1] for run in runs)} of {len(runs)}",
        ]
        for arm, runs in _arms(study)
    ]


def shares(study: Study, name: str, setting: Callable[[str], str]) -> Table:
    """Sweep, setting; of GRPO and GRPO+R2 routing's share of Var(log r) by variance, and the median."""
    rows = []
    for condition in study.conditions:
        measured = {row[0]: row for row in routing_table(study, condition)[1]}
        if {"GRPO", "GRPO+R2"} <= measured.keys():
            told = [measured[arm][i].replace("%", " %") for arm in ("GRPO", "GRPO+R2") for i in (2, 4)]
            rows.append([f"`{name}`", setting(condition), *told])
    return rows


TABLES: Sequence[tuple[str, str, Callable[[Study], Table]]] = (  # archive, sweep in it, table
    ("full", "full", full),
    ("seeds", "seeds", seeds),
    ("seeds", "seeds", batches),
    ("full", "full", partial(shares, name="full", setting="{}, fair rate".format)),
    ("seeds", "seeds", partial(shares, name="seeds", setting="N = 32, 4e-4{}".format)),
    ("mismatch_what", "mismatch", partial(shares, name="mismatch", setting="N = 32, 4e-4, bfloat16 rollout{}".format)),
    ("mismatch_what", "mismatch", mismatch),
    ("mismatch_what", "what", what),
    ("branch", "branch", partial(branches.table, second=4)),
    ("branch", "branch", branches.routing),
    ("control", "control", branches.matrix),
    ("strong", "strong", branches.matrix),
    ("strong2", "strong2", partial(branches.table, second=8)),
    ("dose", "dose", partial(dose.table, arm="GRPO+R2")),
    ("curves", "curves", rates.table),
)


def tables(folder: Path, archives: Sequence[str] = ()) -> Iterator[tuple[str, Table]]:
    """Every table of the named archives (default: all that are there), which are unpacked in `folder`."""
    studies: dict[str, Study] = {}
    for archive, name, make in TABLES:
        if archives and archive not in archives:
            continue
        if name not in studies:
            with tarfile.open(RESULTS / f"{archive}.tar.xz") as packed:
                members = [m for m in packed if m.name.startswith(f"{name}/") and not m.name.endswith(".png")]
                packed.extractall(folder, members, filter="data")
            studies[name] = load(folder / name)
        yield name, make(studies[name])


def _arms(study: Study) -> list[tuple[str, list[Run]]]:
    return [(arm, study.select(arm, "")) for arm in study.arms]


def _mean(runs: Sequence[Run], key: str, last: int = 0) -> float:
    return float(np.mean([run.average(key, last=last) for run in runs]))


def _differences(study: Study, condition: str) -> dict[str, str]:
    """Of every arm the difference in held-out sampled accuracy; "0" where the pairs are equal to the bit."""
    compared = [c for c in compare(study, condition) if c.outcome == branches.SAMPLED]
    return {c.arm: "0" if c.difference.identical else branches.interval(c.difference) for c in compared}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("archives", nargs="*", choices=[[], *dict.fromkeys(archive for archive, _, _ in TABLES)])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in tables(Path(folder), given.archives):
            print(f"{name}\n")
            print("".join(f"| {' | '.join(cells)} |\n" for cells in rows))


if __name__ == "__main__":
    main()
