"""Every table of this page that rests on the committed data, as it stands there.

    python -m experiments.routing_replay.tables                 # all of them, in Markdown
    python -m experiments.routing_replay.tables seeds branch    # of these sweeps

Only the doses of router noise are not among them: `noise.py` measures those anew.
"""

import argparse
import dataclasses
import functools
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.routing_replay import branches, dose, horizon, quoted, rates
from experiments.routing_replay.table_parts import (
    SAMPLED,
    Table,
    collapsed,
    gain,
    interval,
    markdown,
    mean,
    same_states,
    share_of_variance,
    start_of,
    told_share,
)
from jaxrl_llm.report.comparisons import compare
from jaxrl_llm.report.read import CLIPPED, Run, Study, load
from jaxrl_llm.report.statistics import PairedDifference, batches_differ, paired_difference
from jaxrl_llm.report.tables import batch_table

RESULTS = Path(__file__).with_name("results")


def full(study: Study) -> Table:
    """Arm; at each N held-out sampled accuracy at the end and the difference to GRPO."""
    rows = [[arm] for arm in study.arms]
    for condition in study.conditions:
        found = _differences(study, condition)
        for row in rows:
            row += [f"{mean(study.select(row[0], condition), 'eval/pass_at_1', last=1):.3f}", found.get(row[0], "")]
    return rows


def across(study: Study) -> Table:
    """Arm; the difference of held-out sampled accuracy at the end, N = 8, 16 and 32 minus N = 1, paired by seed."""
    ends = {(run.arm, run.condition, run.seed): SAMPLED.measure(run) for run in study.runs}
    numbers = list(dict.fromkeys(run.seed for run in study.runs))
    rows = []
    for arm in study.arms:
        one, *more = ([ends[arm, condition, seed] for seed in numbers] for condition in study.conditions)
        rows.append([arm, *(interval(paired_difference(other, one)) for other in more)])
    return rows


def seeds(study: Study) -> Table:
    """Arm, greedy from start to end, sampled, reward, clipped, experts changed, collapsed."""
    return [
        [
            arm,
            " -> ".join(f"{np.mean([run.value('eval/greedy', at=at) for run in runs]):.3f}" for at in (0, -1)),
            *(f"{mean(runs, key, last):.3f}" for key, last in (("eval/pass_at_1", 1), ("reward/mean", 5))),
            f"{100 * mean(runs, CLIPPED):.1f} %",
            f"{100 * mean(runs, 'routing/flips_old_current'):.1f} %",
            collapsed(runs),
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
    """Arm, greedy and sampled at the end, difference in it to GRPO and to R2, k3 and experts, sampler to old."""
    found, replayed = (_differences(dataclasses.replace(study, baseline=arm), "") for arm in ("GRPO", "GRPO+R2"))
    return [
        [
            arm,
            *(f"{mean(runs, f'eval/{name}', last=1):.3f}" for name in ("greedy", "pass_at_1")),
            found.get(arm, ""),
            replayed.get(arm, ""),
            f"{mean(runs, 'kl/sampler'):.1e}",
            f"{100 * mean(runs, 'routing/flips_sampler_old'):.2f} %",
        ]
        for arm, runs in _arms(study)
    ]


def what(study: Study) -> Table:
    """Arm, sampled at the end, difference to GRPO and to R2 of indices, collapsed."""
    found, indices = (_differences(dataclasses.replace(study, baseline=arm), "") for arm in ("GRPO", "GRPO+R2"))
    return [
        [
            arm,
            f"{mean(runs, 'eval/pass_at_1', last=1):.3f}",
            found.get(arm, ""),
            indices.get(arm, ""),
            collapsed(runs),
        ]
        for arm, runs in _arms(study)
    ]


def shares(study: Study, name: str, setting: Callable[[str], str]) -> Table:
    """Sweep, setting; of GRPO and GRPO+R2 routing's share of Var(log r), its interval over seeds, and the median."""
    rows = []
    for condition in study.conditions:
        both = [study.select(arm, condition) for arm in ("GRPO", "GRPO+R2")]
        if np.isfinite(share_of_variance(both[0])[0]):  # at N = 1 the ratio is 1
            rows.append([f"`{name}`", setting(condition), *(cell for runs in both for cell in told_share(runs))])
    return rows


def against_gspo(study: Study) -> Table:
    """The branches' table with GSPO as the baseline."""
    return branches.table(dataclasses.replace(study, baseline="GSPO"), second=16)


def replicated(study: Study, *earlier: Study, baseline: str = "GRPO", others: Sequence[str] = ()) -> Table:
    """The branches' table of these or all arms, with earlier sweeps as batches, p that all have one mean, what stands.

    A claim is seen in an earlier batch too.
    """

    def side(d: PairedDifference) -> float:
        """Of zero, on which the interval lies; 0: on both."""
        return np.sign(d.low) if d.low * d.high > 0 else 0

    studies = [dataclasses.replace(one, baseline=baseline) for one in (study, *earlier)]
    rows = []
    for condition, arm, *cells in branches.table(studies[0]):
        if arm == baseline:
            rows.append([condition, arm, *cells[:4], *("" for _ in earlier), "", ""])
        elif not others or arm in others:
            new, *old = (branches.difference(one, arm, condition) for one in studies)
            p = batches_differ([branches.by_trajectory(one, arm, condition) for one in studies])
            seen = "claim" if side(new) in map(side, old) else "estimate"
            told = [interval(d) if d.n else "" for d in old]
            one_mean = f"{p:.2g}" if np.isfinite(p) else ""
            rows.append([condition, arm, *cells[:4], *told, one_mean, seen if side(new) else "not seen"])
    return rows


def harm(strong: Study, exact: Study) -> Table:
    """Noise; GRPO with it minus without, by trajectory: accuracy after 4 to 12 rollouts, and gain in four more.

    Over the states that both have.
    """
    quiet = exact.select("GRPO", "N = 4, no noise")
    return [
        [
            noise,
            interval(same_states(strong.select("GRPO", noise), quiet, start_of, first=1)),
            interval(same_states(strong.select("GRPO", noise), quiet, gain)),
        ]
        for noise in strong.conditions
    ]


TABLES: Sequence[tuple[Any, ...]] = (  # the function, and the sweeps that it takes
    (full, "full"),
    (across, "full"),
    (seeds, "seeds"),
    (batches, "seeds"),
    (partial(shares, name="full", setting="{}, fair rate".format), "full"),
    (partial(shares, name="seeds", setting="N = 32, 4e-4{}".format), "seeds"),
    (partial(shares, name="mismatch", setting="N = 32, 4e-4, bfloat16 rollout{}".format), "mismatch"),
    (mismatch, "mismatch"),
    (what, "what"),
    (partial(branches.table, second=4), "branch"),
    (branches.routing, "branch"),
    (partial(branches.table, second=16), "tight"),
    (against_gspo, "tight"),
    (replicated, "precise", "branch", "tight"),
    (partial(replicated, baseline="GRPO clip 1e-08", others=["GSPO"]), "precise", "branch", "tight"),
    (replicated, "confirm", "branch", "precise"),
    (partial(branches.table, second=5), "predict"),
    (branches.matrix, "control"),
    (branches.matrix, "strong"),
    (partial(branches.table, second=8), "strong2"),
    (harm, "strong", "control"),
    (dose.table, "dose"),
    (rates.table, "curves"),
    (rates.at_best, "curves"),
    (rates.by_updates, "curves"),
    (horizon.ends, "horizon"),
    (horizon.differences, "horizon"),
    (quoted.full, "full"),
    (quoted.seeds, "seeds"),
    (quoted.mismatch, "mismatch"),
    (quoted.what, "what"),
    (quoted.predict, "predict"),
    (quoted.control, "control"),
    (quoted.strong, "strong"),
    (quoted.curves, "curves"),
    (quoted.horizon, "horizon"),
)
ARCHIVES = {"mismatch": "mismatch_what", "what": "mismatch_what"}  # of a sweep that has none of its own name


def tables(folder: Path, sweeps: Sequence[str] = ()) -> Iterator[tuple[str, Table]]:
    """The tables whose first sweep is among the named ones (default: all); the data are unpacked in `folder`."""

    @functools.cache
    def study(name: str) -> Study:
        with tarfile.open(RESULTS / f"{ARCHIVES.get(name, name)}.tar.xz") as packed:
            members = [m for m in packed if m.name.startswith(f"{name}/") and not m.name.endswith(".png")]
            packed.extractall(folder, members, filter="data")
        return load(folder / name)

    for make, *names in TABLES:
        if not sweeps or names[0] in sweeps:
            yield names[0], make(*map(study, names))


def _arms(study: Study) -> list[tuple[str, list[Run]]]:
    return [(arm, study.select(arm, "")) for arm in study.arms]


def _differences(study: Study, condition: str) -> dict[str, str]:
    """Of every arm the difference in held-out sampled accuracy; "0" where the pairs are equal to the bit."""
    compared = [c for c in compare(study, condition) if c.outcome == SAMPLED]
    return {c.arm: "0" if c.difference.identical else interval(c.difference) for c in compared}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sweeps", nargs="*", choices=[[], *dict.fromkeys(entry[1] for entry in TABLES)])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in tables(Path(folder), given.sweeps):
            print(f"{name}\n")
            print(markdown(rows))


if __name__ == "__main__":
    main()
