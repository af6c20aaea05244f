"""The tables and the figure of part 1 of the study of gates, out of results/drift.jsonl; `repairs` has part 2.

    python -m experiments.gates.tables [--figure OUT.png] [--workdir DIR]

--workdir names a finished run of a mixture of your own with log.diagnostics_every above 0, whose points are drawn
beside ours in the panels with the nearest number of chosen experts. It may be given several times.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.gates.forms import CONTROL, FORMS
from experiments.gates.measure import CHOSEN, FOLDER, RATES, Cell, read
from experiments.numerics.dose_zero_tables import markdown
from experiments.routing_replay.scale import Point, users
from jaxrl_llm.report.read import load
from jaxrl_llm.report.statistics import MINIMUM_SEEDS, PairedDifference, holm, paired_difference
from jaxrl_llm.report.style import INK, colour, panels

Rows = Sequence[dict[str, Any]]
DRIFTS = (0.01, 0.03, 0.1)
JUDGED = 0.03  # the drift of verdicts
OUTCOMES = ("flips", "share", "tail")
LEAST = "least"  # weight of the expert with the least, over the mean weight
ALIKE = {"flips": math.log(1.25), "share": 0.03, "tail": math.log(1.25)}
FIRST_BATCH = 5  # its seeds
BATCHES = range(FIRST_BATCH), range(FIRST_BATCH, 2 * FIRST_BATCH), range(2 * FIRST_BATCH)  # the last: both
BASE, BIASED, GROUPED = (list(FORMS)[place] for place in (0, 2, 3))
CELLS = [
    "experts",
    "gate",
    "shared",
    "seeds",
    "steps",
    "accuracy",
    "load",
    "least",
    "flips",
    "share",
    "tail",
    "outside",
]
CONTRASTS = ["experts", "contrast", "of", "outcome", "seeds 0 to 4", "seeds 5 to 9", "all", "detectable", "verdict"]
OTHERS = ["experts", "contrast", "outcome", *(f"KL {drift:g}" for drift in DRIFTS)]


def logged(outcome: str) -> bool:
    """Return whether an outcome is compared by factors."""
    return outcome not in ("share", "shapley")


def at(row: dict[str, Any], outcome: str, drift: float) -> float:
    """The outcome of a run (the logarithm of flips and tail) at a drift, linear in log KL between neighbouring rates.

    Beyond the lowest and highest KL it is that of the nearest.
    """
    if outcome == LEAST:  # before the updates, at no drift
        return float(np.log(row.get(LEAST, np.nan)))
    order = np.argsort(row["kl"])
    values = np.array(row[outcome])[order]
    values = np.log(values) if logged(outcome) else values
    return float(np.interp(np.log(drift), np.log(np.array(row["kl"])[order]), values))


def outside(row: dict[str, Any], drift: float) -> bool:
    """Return whether the rates do not enclose the drift."""
    return not min(row["kl"]) <= drift <= max(row["kl"])


def whole_seeds(rows: Rows, chosen: Sequence[int]) -> list[int]:
    """Seeds of which every gate ran, with and without a shared expert, at these numbers of experts."""
    seeds = sorted({row["seed"] for row in rows})
    wanted = 2 * len(FORMS) * len(chosen)
    counted = [row["seed"] for row in rows if row["chosen"] in chosen and row["gate"] in FORMS]
    return [seed for seed in seeds if counted.count(seed) == wanted]


Part = dict[str, Any]  # fields of a cell and their values


def contrasts() -> list[tuple[Sequence[int], str, str, Part, Part]]:
    """Numbers of chosen experts, name, hypothesis, and the cells that are compared."""
    found: list[tuple[Sequence[int], str, str, Part, Part]] = []
    for chosen in CHOSEN:
        for gate, of in zip(list(FORMS)[1:], ("G1, G5", "G1, G5", "G5"), strict=True):
            found.append(((chosen,), f"{gate} - {BASE}", of, {"gate": gate}, {"gate": BASE}))
        found.append(((chosen,), f"{GROUPED} - {BIASED}", "G2", {"gate": GROUPED}, {"gate": BIASED}))
        found.append(((chosen,), "shared expert - none", "G3", {"shared": True}, {"shared": False}))
        for one, other in (("sigmoid", BASE), (BIASED, "sigmoid")):
            found.append(((chosen,), f"{one} - {other}", "G10", {"gate": one}, {"gate": other}))
    return [*found, (CHOSEN, "8 experts - 2", "G4", {"chosen": 8}, {"chosen": 2})]


def contrast(
    rows: Rows, chosen: Sequence[int], one: Part, other: Part, outcome: str, drift: float, seeds: Sequence[int]
) -> PairedDifference:
    """The mean over the cells of one part minus that of the other, paired by seed."""
    gates = {one.get("gate"), other.get("gate")} - {None} or set(FORMS)

    def mean(part: Part, seed: int) -> float:
        own = [row for row in rows if row["seed"] == seed and row["chosen"] in chosen and row["gate"] in gates]
        values = [at(row, outcome, drift) for row in own if part.items() <= row.items()]
        return float(np.mean(values)) if values else float("nan")

    kept = [seed for seed in whole_seeds(rows, chosen) if seed in seeds]
    return paired_difference([mean(one, seed) for seed in kept], [mean(other, seed) for seed in kept])


def tell(d: PairedDifference, outcome: str) -> str:
    """x1.20 [1.10, 1.31] of flips and tail, +2.0 [+1.0, +3.0] in points of the share."""
    if d.n < MINIMUM_SEEDS:
        return ""
    if logged(outcome):
        middle, low, high = np.exp([d.mean, d.low, d.high])
        return f"x{middle:.2f} [{low:.2f}, {high:.2f}]"
    return f"{100 * d.mean:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"


def _detectable(d: PairedDifference, outcome: str) -> str:
    return f"x{math.exp(d.detectable):.2f}" if logged(outcome) else f"{100 * d.detectable:.1f}"


def verdict(first: PairedDifference, second: PairedDifference, both: PairedDifference, p: float, alike: float) -> str:
    """The rule of the protocol; p: corrected, read only where there is no second batch."""
    if both.n < MINIMUM_SEEDS:
        return ""
    if -alike < both.low and both.high < alike:
        return "alike"
    if second.n < MINIMUM_SEEDS:
        return "estimate" if p < 0.05 else "open"
    same_sign = first.mean * second.mean > 0
    return "differs" if same_sign and second.low * second.high > 0 else "open"


def contrast_table(rows: Rows) -> list[list[str]]:
    """The table with the head `CONTRASTS`."""
    found = []
    for outcome in OUTCOMES:
        batches = [
            [contrast(rows, chosen, one, other, outcome, JUDGED, seeds) for seeds in BATCHES]
            for chosen, _, _, one, other in contrasts()
        ]
        corrected = holm([both.p for _, _, both in batches])
        for (chosen, name, of, *_), (first, second, both), p in zip(contrasts(), batches, corrected, strict=True):
            if both.n < MINIMUM_SEEDS:
                continue
            cells = [tell(d, outcome) for d in (first, second, both)]
            judged = verdict(first, second, both, float(p), ALIKE[outcome])
            experts = ", ".join(map(str, chosen))
            found.append([experts, name, of, outcome, *cells, _detectable(both, outcome), judged])
    return found


def other_drifts(rows: Rows) -> list[list[str]]:
    """The table with the head `OTHERS`: the contrasts over all seeds, at each drift."""
    found = []
    for outcome in OUTCOMES:
        for chosen, name, _, one, other in contrasts():
            ds = [contrast(rows, chosen, one, other, outcome, drift, BATCHES[-1]) for drift in DRIFTS]
            if ds[0].n >= MINIMUM_SEEDS:
                found.append([", ".join(map(str, chosen)), name, outcome, *(tell(d, outcome) for d in ds)])
    return found


def of_cell(rows: Rows, cell: Cell) -> Rows:
    return [row for row in rows if vars(cell).items() <= row.items()]


def cell_table(rows: Rows) -> list[list[str]]:
    """The table with the head `CELLS`: means over seeds, geometric of flips and tail, at the drift of verdicts."""
    found = []
    for chosen in CHOSEN:
        for shared in (False, True):
            for gate in (*FORMS, *CONTROL):
                own = of_cell(rows, Cell(gate, shared, chosen))
                if not own:
                    continue
                steps, accuracy, load = (np.mean([row[name] for row in own]) for name in ("steps", "accuracy", "load"))
                flips, share, tail = (np.mean([at(row, name, JUDGED) for row in own]) for name in OUTCOMES)
                beyond = sum(outside(row, JUDGED) for row in own)
                cells = [str(chosen), gate, "yes" if shared else "no", str(len(own)), f"{steps:.0f}", f"{accuracy:.2f}"]
                least = [row[LEAST] for row in own if LEAST in row]
                cells += [f"{load:.1f}", f"{np.mean(least):.2f}" if least else ""]
                cells += [f"{100 * np.exp(flips):.1f} %", f"{100 * share:.1f} %", f"{np.exp(tail):.2f}"]
                found.append([*cells, str(beyond)])
    return found


def every(drift: Rows) -> list[tuple[Sequence[str], list[list[str]]]]:
    """Head and body of every table of part 1."""
    return [(CELLS, cell_table(drift)), (CONTRASTS, contrast_table(drift)), (OTHERS, other_drifts(drift))]


def sentences(drift: Rows) -> list[str]:
    """Parts of the page's sentences that hold numbers."""

    def shares(gates: Sequence[str], outcome: str = "share", chosen: int = 8) -> str:
        rows = [of_cell(drift, Cell(gate, shared, chosen)) for gate in gates for shared in (False, True)]
        means = [100 * float(np.mean([at(row, outcome, JUDGED) for row in own])) for own in rows]
        return f"{min(means):.0f} to {max(means):.0f} %"

    def factor(one: str, other: str, outcome: str, chosen: int = 8) -> str:
        d = contrast(drift, (chosen,), {"gate": one}, {"gate": other}, outcome, JUDGED, BATCHES[-1])
        return tell(d, outcome)

    sigmoids = [gate for gate in FORMS if gate.startswith("sigmoid")]
    softmaxes = [gate for gate in FORMS if gate.startswith("softmax")]

    def explained(chosen: int, seed: int) -> float:
        own = [row for row in drift if row["chosen"] == chosen and row["seed"] == seed and row["gate"] in FORMS]
        return math.log(np.mean([at(row, "share", JUDGED) for row in own]))

    eight, two = ([explained(chosen, seed) for seed in whole_seeds(drift, CHOSEN)] for chosen in CHOSEN)
    return [
        f"{shares(softmaxes)} of Var(log r) with softmax gates, {shares(sigmoids)} with sigmoid gates",
        f"with the mean of both orders (Shapley) the shares are {shares(softmaxes, 'shapley')} and "
        f"{shares(sigmoids, 'shapley')}",
        f"{shares(softmaxes, chosen=2)} with softmax gates and {shares(sigmoids, chosen=2)} with sigmoid gates",
        f"routing's share with 8 experts a token is {tell(paired_difference(eight, two), 'flips')} that with 2",
        f"{factor(BIASED, BASE, 'flips')} as many experts change (with groups {factor(GROUPED, BASE, 'flips')})",
        f"the last chosen expert has {factor(BIASED, BASE, LEAST)} the weight",
        f"with 2 experts a token {factor(BIASED, BASE, LEAST, chosen=2)}",
    ]


def figure(rows: Rows, own: Sequence[Point] = ()) -> Figure:
    """Flips and routing's share against drift, a colour a gate, dashed with a shared expert; crosses are your own."""
    measures: Sequence[tuple[str, str, Callable[[Point], float]]] = (
        ("flips", "experts that differ", lambda point: point.flips),
        ("share", "routing's share of Var(log r)", lambda point: point.share),
    )
    shown = [chosen for chosen in CHOSEN if any(row["chosen"] == chosen for row in rows)]
    titles = [f"{title}, {chosen} of 32 experts a token" for chosen in shown for _, title, _ in measures]
    drawn, axes = panels(titles, columns=2, height=3.9, along="drift: KL to the old policy after 8 updates")
    for ax, (chosen, (name, _, of)) in zip(axes, [(c, m) for c in shown for m in measures], strict=True):
        for gate in (*FORMS, *CONTROL):
            for shared in (False, True):
                runs = of_cell(rows, Cell(gate, shared, chosen))
                if not runs:
                    continue
                kl = np.exp(np.mean(np.log([row["kl"] for row in runs]), axis=0))
                values = np.array([row[name] for row in runs])
                middle = np.exp(np.mean(np.log(values), axis=0)) if logged(name) else np.mean(values, axis=0)
                style = "--" if shared else "-"
                label = f"{gate}{', shared expert' if shared else ''}"
                ink = colour([*FORMS, *CONTROL], gate)
                ax.plot(kl, 100 * middle, style, marker="o", markersize=4, color=ink, label=label)
        for point in own:
            nearest = min(shown, key=lambda k: abs(math.log(k / 32 / point.part)))
            if nearest == chosen:
                ax.plot(point.drift, 100 * of(point), "x", color=INK, markersize=9, markeredgewidth=2)
                ax.annotate(point.setting, (point.drift, 100 * of(point)), xytext=(6, 4), textcoords="offset points")
        ax.set_xscale("log")
        ax.set_ylabel("%", fontsize=8.5, color=INK)
        ax.set_ylim(bottom=0)
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7.5, frameon=False)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, action="append", default=[])
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    drift = read(FOLDER / "drift.jsonl")
    print(f"rates {', '.join(f'{rate:g}' for rate in RATES)}; at KL {JUDGED:g} but for the third table\n")
    print("\n".join(markdown(head, body) for head, body in every(drift)))
    print("\n".join(sentences(drift)))
    own = [point for folder in given.workdir for point in users(load(folder))]
    for point in own:
        print(f"{point.setting}: KL {point.drift:.2g}, flips {point.flips:.2%}, share {point.share:.1%}")
    if given.figure:
        figure(drift, own).savefig(given.figure)


if __name__ == "__main__":
    main()
