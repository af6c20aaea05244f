"""The tables and the figure of the study of dose zero, out of results/dose_zero.jsonl.

python -m experiments.numerics.dose_zero_tables [DATA.jsonl] [--figure OUT.png]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from experiments.numerics.dose_zero import ARMS, MODELS, RATES, RESULTS, arms, read
from jaxrl_llm.report.statistics import MINIMUM_SEEDS, PairedDifference, paired_difference
from jaxrl_llm.report.style import INK, colour, panels

Rows = Sequence[dict[str, Any]]
HARMLESS = 0.03
# Hypothesis: the difference, and the sign that an effect would have; 0: that there is none.
PAIRS: dict[tuple[str, str], tuple[str, int]] = {
    ("fast", "exact"): ("Z1, Z2", -1),
    ("GSPO fast", "GSPO exact"): ("Z1", -1),
    ("fast + TIS", "fast"): ("Z3", 1),
    ("fast + R3", "fast"): ("Z3", 1),
    ("exact + R3", "exact"): ("Z4", 0),
    ("fast, 8 rows at a time", "fast"): ("Z5", 0),
    ("exact, 8 rows at a time", "exact"): ("Z5", 0),
}
DIFFERENCES = ["model", "rate", "difference", "of", "seeds", "accuracy", "standard error", "detectable", "verdict"]
BATCHES = ["model", "difference", "of", "seeds 0 to 9", "seeds 10 to 19", "verdict of these", "all", "detectable"]
FIRST_BATCH = 10  # its seeds; those behind are of the second
MISMATCH = ["model", "rate", "arm", "seeds", "start -> end", "equal tokens", "k3", "experts that differ"]


def of_arm(rows: Rows, model: str, rate: str, arm: str) -> dict[int, dict[str, Any]]:
    """The runs of an arm by seed."""
    wanted = {"model": model, "rate": rate, "arm": arm}
    return {row["seed"]: row for row in rows if wanted.items() <= row.items()}


def difference(rows: Rows, model: str, rate: str, pair: tuple[str, str]) -> PairedDifference:
    """Accuracy at the end, the first arm minus the second, over the seeds that both have."""
    one, other = (of_arm(rows, model, rate, arm) for arm in pair)
    both = sorted(one.keys() & other.keys())
    return paired_difference(*([runs[seed]["accuracy"][-1] for seed in both] for runs in (one, other)))


def told(d: PairedDifference) -> str:
    return f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"


def standard_error(d: PairedDifference) -> float:
    return (d.high - d.low) / (2 * float(stats.t.ppf(0.975, d.n - 1)))


def verdict(d: PairedDifference, rate: str, sign: int) -> str:
    """The rule of the protocol: at the tuned rate every difference is asked to be harmless."""
    if d.n < MINIMUM_SEEDS:
        return ""
    if sign and rate != "tuned":
        return "holds" if sign * d.low > 0 and sign * d.high > 0 else "open"
    return "harmless" if d.low > -HARMLESS and d.high < HARMLESS else "open"


def differences(rows: Rows) -> list[list[str]]:
    """The table with the head `DIFFERENCES`."""
    found = []
    for model in MODELS:
        for rate in RATES:
            for pair, (hypothesis, sign) in PAIRS.items():
                d = difference(rows, model, rate, pair)
                if d.n < 2:
                    continue
                numbers = [f"{standard_error(d):.3f}", f"{d.detectable:.3f}", verdict(d, rate, sign)]
                found.append([model, rate, f"{pair[0]} minus {pair[1]}", hypothesis, str(d.n), told(d), *numbers])
    return found


def batches(rows: Rows) -> list[list[str]]:
    """The table with the head `BATCHES`: differences at the high rate that the second batch has too."""
    found, first, second = [], *parted(rows)
    for model in MODELS:
        for pair, (hypothesis, sign) in PAIRS.items():
            early, late, both = (difference(one, model, "too high", pair) for one in (first, second, rows))
            if late.n > 1:
                cells = [told(early), told(late), verdict(late, "too high", sign), told(both), f"{both.detectable:.3f}"]
                found.append([model, f"{pair[0]} minus {pair[1]}", hypothesis, *cells])
    return found


def parted(rows: Rows) -> tuple[Rows, Rows]:
    """The runs of the first batch, and those of the second."""
    first = [row for row in rows if row["seed"] < FIRST_BATCH]
    return first, [row for row in rows if row["seed"] >= FIRST_BATCH]


def mismatch(rows: Rows) -> list[list[str]]:
    """The table with the head `MISMATCH`: means over the steps and seeds of an arm."""
    found = []
    for model in MODELS:
        for rate in RATES:
            for arm in arms(model):
                runs = of_arm(rows, model, rate, arm).values()
                if not runs:
                    continue
                start, end = np.mean([row["accuracy"] for row in runs], axis=0)
                names = ("check/sampler_equal", "kl/sampler", "routing/flips_sampler_old")
                equal, k3, flips = (np.mean([np.mean(row.get(name, 0)) for row in runs]) for name in names)
                cells = [f"{start:.3f} -> {end:.3f}", f"{equal:.2%}", f"{k3:.1e}" if k3 else "0"]
                found.append([model, rate, arm, str(len(runs)), *cells, f"{flips:.2%}" if model == "mixture" else ""])
    return found


def figure(rows: Rows) -> Figure:
    """Every difference with its interval, at both rates; grey is the span that counts as harmless."""
    titles = [f"{model}, {rate} rate" for model in MODELS for rate in RATES if rows_of(rows, model, rate)]
    drawn, axes = panels(titles, columns=2, height=3.2, along="held-out sampled accuracy, difference at the end")
    for ax, title in zip(axes, titles, strict=True):
        model, rate = title.removesuffix(" rate").split(", ")
        shown = [pair for pair in PAIRS if difference(rows, model, rate, pair).n > 1]
        for place, pair in enumerate(shown):
            d = difference(rows, model, rate, pair)
            ax.errorbar(
                d.mean, -place, xerr=[[d.mean - d.low], [d.high - d.mean]], fmt="o", color=colour(["", *ARMS], pair[0])
            )
        ax.axvspan(-HARMLESS, HARMLESS, color="#eeeeee", zorder=0)
        ax.axvline(0, color=INK, linewidth=0.8)
        ax.set_yticks([-place for place in range(len(shown))], [f"{a} - {b}" for a, b in shown], fontsize=8)
        ax.grid(False)
    return drawn


def rows_of(rows: Rows, model: str, rate: str) -> Rows:
    return [row for row in rows if (row["model"], row["rate"]) == (model, rate)]


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["--"] * len(head), *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    rows = read(given.data)
    first, _ = parted(rows)
    print(markdown(DIFFERENCES, differences(first)))
    print(markdown(BATCHES, batches(rows)))
    print(markdown(MISMATCH, mismatch(first)), end="")
    if given.figure:
        figure(first).savefig(given.figure)


if __name__ == "__main__":
    main()
