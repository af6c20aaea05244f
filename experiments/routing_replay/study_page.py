"""The study's page and what README.md says of it, with every result out of a row of `results/*.md`.

    python -m experiments.routing_replay.study_page            # prints both
    python -m experiments.routing_replay.study_page --write    # README.md here, "What we found" in the project's README

The texts are `study_page.txt` and `study_findings.txt`: Markdown with slots. {runs; countdown, dense, N = 8, tuned;
GSPO minus GRPO; estimate} is a table of TABLES, cells that one of its rows alone has, and the column (or a part of it,
see `table_rows.py`) that is quoted; "range of share" for the column is its span over all rows with those cells. A test
holds the pages to what this writes, and the texts to slots: no result stands in them as a number.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.routing_replay.table_rows import Row, filled, row_of, rows_under, rows_with, spans

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
FROM, TO = "## What we found\n\n", "\n## "  # what is between them in README is the findings
SPAN = "range of "

# A name of each table: its page in results/, and how its caption begins.
TABLES: Mapping[str, tuple[str, str]] = {
    "one rollout": ("pooled", "One rollout of 32 updates"),
    "one rollout by cut": ("pooled", "One rollout by what an arm cuts"),
    "runs": ("pooled", "Whole runs by what an arm cuts"),
    "ends": ("negatives_runs", "Whole runs of 30 rollouts"),
    "too high": ("pooled", "Whole runs at 4e-4, N = 32 (`seeds`)"),
    "ends too high": ("seeds", "Ten seeds at N = 32"),
    "start too high": ("seeds", "Numbers that stand"),
    "bfloat16": ("mismatch", "A bfloat16 rollout"),
    "long runs": ("pooled", "Runs of 300 rollouts"),
    "full": ("full", "Held-out sampled accuracy at the end"),
    "about full": ("full", "Numbers that stand"),
    "seeds of full": ("../../../docs/results", "- `full`: 30 rollouts"),
    "negatives": ("negatives", "One rollout of 32 updates"),
    "cost": ("pooled", "Whole runs: GRPO with each sampler"),
    "remedies": ("pooled", "The same: every remedy"),
    "samplers": ("choices", "Samplers that choose"),
    "SmolLM2": ("negatives_real", "Whole runs of 16 rollouts"),
    "shares": ("branch", "What routing does to the ratio"),
    "branch": ("branch", "One rollout from shared states"),
    "shapes": ("sizes", "What was measured"),
    "line": ("sizes", "log share"),
    "upcycled": ("sizes", "SmolLM2 upcycled"),
    "dose": ("dose", "GRPO's rollouts measured"),
    "curves": ("curves", "Held-out sampled accuracy at the end"),
}


@functools.cache
def table(name: str) -> Sequence[Row]:
    """The rows of a table of TABLES; "tuned" has a row for each N, with the rate of every arm."""
    if name == "tuned":
        tuned = json.loads((HERE / "tuned.json").read_text())
        return [{"": n, **{arm: _rate(rate) for arm, rate in arms.items()}} for n, arms in tuned.items()]
    page, caption = TABLES[name]
    rows = rows_under((HERE / "results" / f"{page}.md").read_text(), caption)
    if name == "line":  # a factor belongs to the row above it
        first = "trajectories"
        return [{**row, first: f"{row[first]}, {above[first]}"} for above, row in itertools.pairwise(rows)]
    if name == "upcycled":
        return [
            {**row, "measured / fit": f"{_percent(row['share measured']) / _percent(row['share by the fit']):.1f}"}
            for row in rows
        ]
    return rows


def _percent(cell: str) -> float:
    return float(cell.split(" %")[0])


def _rate(rate: float) -> str:
    return np.format_float_scientific(rate, trim="-", exp_digits=1)


def cell(name: str, *row: str) -> str:
    """The parts of a slot's name: a table, cells that one of its rows alone has, and last the column.

    Raises:
        KeyError: no table, or no column, has that name.
        ValueError: none of the rows has these cells, or several have.
    """
    *cells, column = row
    if column.startswith(SPAN):
        return spans(rows_with(table(name), *cells))[column.removeprefix(SPAN)]
    return row_of(table(name), *cells)[column]


def page() -> str:
    return filled((HERE / "study_page.txt").read_text(), cell)


def readme(text: str) -> str:
    """The project's README.md with the findings in their place."""
    before, after = text.split(FROM)
    end = after.index(TO)
    return before + FROM + filled((HERE / "study_findings.txt").read_text(), cell) + after[end:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="into both README.md")
    whole = readme(README.read_text())
    if parser.parse_args().write:
        (HERE / "README.md").write_text(page())
        README.write_text(whole)
    else:
        print(page(), whole, sep="\n", end="")


if __name__ == "__main__":
    main()
