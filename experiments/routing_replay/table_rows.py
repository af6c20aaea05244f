"""Rows of Markdown tables by name, so that a text quotes their cells and nobody types a number.

A row maps columns to cells. Beside them it has what is read off its cells: of "0.759 -> 0.423" `start` and `end`, of
three drifts each, where an end with its interval `ends at`, and of a comparison its `estimate`, its `size` without a
sign and, in the words of the study's page, its `verdict`, its whole `result` and its short form in a table, `marked`.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import mdformat

Row = Mapping[str, str]
SLOT = re.compile(r"\{([^{}]+)\}")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e-?\d+)?")
NONE_FOUND = "no effect found"
VERDICTS = {"claim": "**claim**", NONE_FOUND: NONE_FOUND + " (could detect {detectable})"}  # the others as in the table


def filled(text: str, cell: Callable[..., str]) -> str:
    """The Markdown with its slots filled, in lines of 120 columns; {a; b; c} is cell("a", "b", "c").

    What a slot was filled with stays on one line.
    """

    def fill(slot: re.Match[str]) -> str:
        return cell(*" ".join(slot[1].split()).split("; ")).replace(" ", "\N{NO-BREAK SPACE}")

    options = {"wrap": 120, "plugin": {"tables": {"compact_tables": True}}}
    page = mdformat.text(SLOT.sub(fill, text), options=options, extensions={"gfm", "tables"})
    return page.replace("\N{NO-BREAK SPACE}", " ")


def rows_under(text: str, caption: str) -> list[Row]:
    """The rows of the table under the paragraph that begins so, its lines joined.

    A column whose name stands twice in a table is called by its left neighbour too: "N = 8 difference".

    Raises:
        ValueError: no paragraph, or more than one, begins so and has a table below it.
    """
    blocks = [block if block.startswith("|") else " ".join(block.split()) for block in text.split("\n\n")]
    found = [after for before, after in itertools.pairwise(blocks) if before.startswith(caption)]
    if len(found) != 1 or not found[0].startswith("|"):
        raise ValueError(f"{len(found)} tables stand under {caption!r}")
    head, _, *body = (_cells(line) for line in found[0].strip().split("\n"))
    columns = [f"{head[i - 1]} {name}" if head.count(name) > 1 else name for i, name in enumerate(head)]
    return [_with_parts(dict(zip(columns, cells, strict=True))) for cells in body]


def rows_with(rows: Iterable[Row], *cells: str) -> list[Row]:
    """The rows that have all of these cells."""
    return [row for row in rows if set(cells) <= set(row.values())]


def row_of(rows: Iterable[Row], *cells: str) -> Row:
    """The one row that has all of these cells.

    Raises:
        ValueError: none has them, or several.
    """
    found = rows_with(rows, *cells)
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows have {cells}")
    return found[0]


def spans(rows: Sequence[Row]) -> Row:
    """The smallest and the largest number, "6.5 to 46.0", of every column whose cells all begin with one."""
    found = {}
    for column in rows[0]:
        numbers = [match[0] for row in rows if (match := NUMBER.match(row.get(column, "")))]
        if len(numbers) == len(rows):
            low, *_, high = sorted(numbers, key=float)
            found[column] = f"{low} to {high}"
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split(" | ")]


def _with_parts(row: dict[str, str]) -> Row:
    """The row, and what is read off its cells."""
    parts = dict(row)
    for cell in row.values():
        if " -> " in cell:
            parts["start"], parts["end"] = cell.strip("()").split(" -> ")
    for i, drift in enumerate(row.get("KL to old", "").split(" / "), 1):
        parts[f"drift {i}"] = drift
    if match := NUMBER.match(row.get("end", "")):
        parts["ends at"] = match[0]
    difference = row.get("pooled difference", "")
    if match := NUMBER.match(difference):
        parts["estimate"], parts["size"] = match[0], match[0].lstrip("-+")
    if "stands" in row:
        verdict = parts["verdict"] = VERDICTS.get(row["stands"], row["stands"]).format_map(row)
        parts["result"] = f"{difference}, n = {row['n']}: {verdict}"
        parts["marked"] = f"{difference} " + (f"({row['detectable']})" if row["stands"] == NONE_FOUND else verdict)
    return parts
