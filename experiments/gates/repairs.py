"""The tables of part 2 of the study of gates, out of results/repair.jsonl: what a mismatch costs, and what repairs it.

    python -m experiments.gates.repairs [--write]

prints the table of the page, and with --write puts every comparison into results/repair.md.
"""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.gates.measure import ARMS, DOSED, DOSES, EXACT, FOLDER, LAGS, OTHERS, REMEDIES, Cell, Dose, read
from experiments.gates.tables import BATCHES, Rows, verdict
from experiments.numerics.dose_zero_tables import markdown, told
from jaxrl_llm.report.statistics import MINIMUM_SEEDS, PairedDifference, paired_difference

GATES = (*DOSED, *OTHERS)
Gains = dict[int, float]  # differences of accuracy by seed
DIFFERENCE = ["seeds", "difference", "seeds 5 to 9", "detectable", "verdict"]
PLACE = ["gate", "dose", "lag"]
OVERVIEW = [*PLACE, "seeds", "none ends at", "cost", *REMEDIES, "detectable"]
RUNS = [*PLACE, "arm", "seeds", "start -> end", "k3", "experts", "KL to old"]
COMPARED = [*PLACE, "arm", "minus", *DIFFERENCE]
BETWEEN = [*PLACE, "arm", "minus", *DIFFERENCE]


def places(rows: Rows, cells: Sequence[Cell] = GATES) -> list[tuple[Cell, Dose, int]]:
    """Gate, dose and lag of everything that ran, in the order of the tables."""
    every = [(cell, dose, lag) for cell in cells for dose in (EXACT, *DOSES) for lag in sorted(LAGS)]
    return [place for place in every if ends(rows, *place, "none")]


def ends(rows: Rows, cell: Cell, dose: Dose, lag: int, arm: str) -> dict[int, dict[str, Any]]:
    """The runs of an arm by seed."""
    wanted = {**vars(cell), "dose": dose, "lag": lag, "arm": arm}
    return {row["seed"]: row for row in rows if wanted.items() <= row.items()}


def minus(one: Gains, other: Gains) -> Gains:
    """The difference at the seeds that both have."""
    return {seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())}


def gains(rows: Rows, cell: Cell, dose: Dose, lag: int, arm: str) -> Gains:
    """A remedy minus `none` at its dose and lag.

    Of `none` it is the cost: at a dose minus `none` without one at this lag, without a dose minus `none` without a lag.
    """
    other = (EXACT, lag if dose else 0) if arm == "none" else (dose, lag)
    runs = ends(rows, cell, dose, lag, arm), ends(rows, cell, *other, "none")
    one, base = ({seed: row["accuracy"][-1] for seed, row in of.items()} for of in runs)
    return minus(one, base)


def repaired(rows: Rows, cell: Cell, dose: Dose, lag: int, arm: str) -> Gains:
    """The gain of a remedy minus its gain without a dose and a lag."""
    return minus(gains(rows, cell, dose, lag, arm), gains(rows, cell, EXACT, 0, arm))


def over(found: Gains, seeds: Sequence[int] = BATCHES[-1]) -> PairedDifference:
    """The mean over the seeds of a batch."""
    kept = [value for seed, value in found.items() if seed in seeds]
    return paired_difference(kept, [0.0] * len(kept))


def judged(found: Gains) -> list[str]:
    """The cells of `DIFFERENCE`; none below the least number of seeds."""
    batches = [over(found, seeds) for seeds in BATCHES]
    _, second, both = batches
    if both.n < MINIMUM_SEEDS:
        return []
    again = told(second) if second.n >= MINIMUM_SEEDS else ""
    return [str(both.n), told(both), again, f"{both.detectable:.3f}", verdict(*batches, p=0.0, alike=0.0)]


def named(cell: Cell, dose: Dose, lag: int) -> list[str]:
    """The cells of `PLACE`."""
    return [cell.gate, f"{dose:g}" if isinstance(dose, float) else str(dose), str(lag)]


def overview(rows: Rows) -> list[list[str]]:
    """The table with the head `OVERVIEW`; bold: it differs by the rule. Detectable: the largest of the row."""
    found = []
    for place in places(rows):
        runs = ends(rows, *place, "none").values()
        compared = [gains(rows, *place, arm) if place[1:] != (EXACT, 0) or arm != "none" else {} for arm in ARMS]
        cells = [judged(one) for one in compared]
        if not any(cells):
            continue
        texts = [(f"**{one[1]}**" if one[-1] == "differs" else one[1]) if one else "" for one in cells]
        end = np.mean([row["accuracy"][-1] for row in runs])
        found.append([*named(*place), str(len(runs)), f"{end:.3f}", *texts, max(one[3] for one in cells if one)])
    return found


def runs_table(rows: Rows) -> list[list[str]]:
    """The table with the head `RUNS`: means over seeds."""
    found = []
    for place in places(rows):
        for arm in ARMS:
            runs = ends(rows, *place, arm).values()
            if runs:
                start, end = np.mean([row["accuracy"] for row in runs], axis=0)
                names = ("kl/sampler", "routing/flips_sampler_old", "kl/old")
                k3, flips, drift = (np.mean([row[name] for row in runs]) for name in names)
                numbers = [f"{k3:.1e}", f"{100 * flips:.1f} %", f"{drift:.1e}"]
                found.append([*named(*place), arm, str(len(runs)), f"{start:.3f} -> {end:.3f}", *numbers])
    return found


def comparisons(rows: Rows, place: tuple[Cell, Dose, int]) -> list[tuple[str, str, Gains]]:
    """Arm, what is taken from it, and the difference, at a place: costs, gains and repairs."""
    cell, dose, lag = place
    base = "none at dose 0" if dose else "none at lag 0"
    found = [(arm, base if arm == "none" else "none", gains(rows, *place, arm)) for arm in ARMS]
    if not dose and not lag:
        return found[1:]
    if dose and lag:
        found.append(("none", "the same without a lag", minus(found[0][-1], gains(rows, cell, dose, 0, "none"))))
    found.append(("TIS", "GSPO", minus(gains(rows, *place, "TIS"), gains(rows, *place, "GSPO"))))
    return [*found, *((arm, "none, as repair", repaired(rows, *place, arm)) for arm in REMEDIES)]


def compared_table(rows: Rows) -> list[list[str]]:
    """The table with the head `COMPARED`."""
    found = []
    for place in places(rows):
        for arm, other, difference in comparisons(rows, place):
            cells = judged(difference)
            if cells:
                found.append([*named(*place), arm, other, *cells])
    return found


def between_gates(rows: Rows) -> list[list[str]]:
    """The table with the head `BETWEEN`: every comparison with a gate minus that with `softmax, renormalised`."""
    base, *others = GATES
    found = []
    for gate, (_, dose, lag) in itertools.product(others, places(rows, [base])):
        pairs = zip(comparisons(rows, (base, dose, lag)), comparisons(rows, (gate, dose, lag)), strict=True)
        for (arm, other, one), (*_, another) in pairs:
            cells = judged(minus(another, one))
            if cells:
                found.append([*named(gate, dose, lag), arm, other, *cells])
    return found


def page(rows: Rows) -> str:
    """The text of results/repair.md."""
    parts = [
        "# The form of a gate: all comparisons of part 2",
        "Written by `python -m experiments.gates.repairs --write`; do not edit. [The study](../README.md) says what "
        "they show.",
        "The runs: means over seeds, k3, experts that differ and KL as means over rollouts.",
        markdown(RUNS, runs_table(rows)).rstrip(),
        "Differences of held-out accuracy with 95 % t intervals. `none, as repair` is the gain over `none` "
        "minus the gain without dose and lag; `the same without a lag` is taken from a cost.",
        markdown(COMPARED, compared_table(rows)).rstrip(),
        f"The same with a gate minus the same with `{GATES[0].gate}`.",
        markdown(BETWEEN, between_gates(rows)),
    ]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    rows = read(FOLDER / "repair.jsonl")
    print(markdown(OVERVIEW, overview(rows)), end="")
    if given.write:
        (FOLDER / "repair.md").write_text(page(rows))


if __name__ == "__main__":
    main()
