"""python -m experiments.mismatch.tables: the tables of the page out of results/measured.jsonl.

Every number is a mean over seeds with its interval of 95 % (Student's t), unless its column says otherwise.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.mismatch.measure import MODELS, RESULTS, SAMPLERS, TRAINERS, read
from jaxrl_llm.report.statistics import half_width

Rows = Sequence[dict[str, Any]]
HEADERS = {
    "agreement": "model | sampler | trainer | seeds | k3 | k3 with R3 | mean abs(d) | d above ln 2",
    "tails": "model | sampler | trainer | 50 % | 90 % | 99 % | 99.9 % | largest",
    "flips": "model | sampler | trainer | layer 1 | layer 2 | layer 3",
}
_TWO = ("vLLM bfloat16", "float32")  # sampler and trainer that most hypotheses are about


def chosen(rows: Rows, model: str, sampler: str, trainer: str) -> Rows:
    """The measurements of a condition, in the order of their seeds."""
    wanted = {"model": model, "sampler": sampler, "trainer": trainer}
    found = [row for row in rows if wanted.items() <= row.items()]
    return sorted(found, key=lambda row: row["seed"])


def told(values: Sequence[float]) -> str:
    """The mean and, of two seeds or more, its interval."""
    mean, half = float(np.mean(values)), float(half_width(values))
    return f"{mean:.2g}" if np.isnan(half) else f"{mean:.2g} [{mean - half:.2g}, {mean + half:.2g}]"


def table(rows: Rows, name: str) -> list[str]:
    """The rows of a table of `HEADERS`, as Markdown."""
    of: Callable[[Rows], list[str]] = {"agreement": _agreement, "tails": _tails, "flips": _flips}[name]
    found = []
    for model in MODELS:
        for sampler in SAMPLERS:
            for trainer in TRAINERS:
                if own := chosen(rows, model, sampler, trainer):
                    found.append(f"| {' | '.join([model, sampler, trainer, *of(own)])} |")
    return found


def _agreement(own: Rows) -> list[str]:
    above, tokens = (sum(row[key] for row in own) for key in ("above_ln2", "tokens"))
    numbers = [told([row[key] for row in own]) for key in ("k3", "k3_replayed", "mean_size")]
    return [str(len(own)), *numbers, f"{above} of {tokens}"]


def _tails(own: Rows) -> list[str]:
    values = np.array([row["quantiles"] for row in own])
    return [f"{x:.2g}" for x in (*values[:, :-1].mean(0), values[:, -1].max())]


def _flips(own: Rows) -> list[str]:
    return [told(layer) for layer in 100 * np.array([row["flips_by_layer"] for row in own]).T]


def hypotheses(rows: Rows) -> dict[str, list[str]]:
    """Numbers of the hypotheses, {name: means over the seeds that have what is compared, with intervals}."""

    def paired(key: Callable[[Any, Any], float], one: Sequence[str], other: Sequence[str]) -> str:
        ours, theirs = ({row["seed"]: row for row in chosen(rows, *names)} for names in (one, other))
        both = sorted(ours.keys() & theirs.keys())
        return told([key(ours[seed], theirs[seed]) for seed in both]) if both else "not measured"

    def k3(a: Any, b: Any) -> float:
        return a["k3"] / b["k3"]

    def flips(a: Any, b: Any) -> float:
        return float(np.mean(a["flips_by_layer"]) / np.mean(b["flips_by_layer"]))

    mixture, upcycled = ("mixture", *_TWO), ("upcycled", *_TWO)
    return {
        "M3": [paired(lambda a, _: 100 * (a["flips_by_layer"][-1] - a["flips_by_layer"][0]), mixture, mixture)],
        "M4": [paired(k3, ("mixture", _TWO[0], "bfloat16"), mixture)],
        "M5": [paired(flips, upcycled, mixture), paired(k3, upcycled, mixture)],
        "M6": [paired(lambda a, _: a["k3_replayed"] / a["k3"], mixture, mixture)],
        "M7": [paired(k3, ("mixture", "own bfloat16", _TWO[1]), mixture)],
    }


def main() -> None:
    rows = read(RESULTS)
    for name, header in HEADERS.items():
        print(f"| {header} |\n|{' -- |' * (header.count('|') + 1)}")
        print("\n".join(table(rows, name)), end="\n\n")
    for name, found in hypotheses(rows).items():
        print(f"{name}: {'; '.join(found)}")


if __name__ == "__main__":
    main()
