"""A table as CSV and as LaTeX, for a paper."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.ground.terminal import visible

_LATEX = {char: f"\\{char}" for char in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "->": r"$\to$",
    "\n": r"\newline{}",
    "[": "{[}",  # at the start of a row it would be an argument of the line break before
}
_SPECIAL = re.compile("|".join(map(re.escape, sorted(_LATEX, key=len, reverse=True))))
_SIGN = re.compile(r"(?<![\w.)])([-+])(?=\d)")  # of a number: a minus is longer than a hyphen


def write_table(stem: Path, header: Sequence[str], rows: Sequence[Sequence[str]], *, prose: bool) -> None:
    """Write STEM.csv and STEM.tex, a `tabular` with the rules of booktabs. Prose is of others: see `_inert`."""
    with stem.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        made = csv.writer(file, lineterminator="\n")
        made.writerows([[_inert(cell) if prose else visible(cell) for cell in row] for row in (header, *rows)])
    columns = f"p{{{0.9 / len(header):.2f}\\linewidth}}" * len(header) if prose else f"l{'r' * (len(header) - 1)}"
    body = [f"{' & '.join(latex(cell, prose=prose) for cell in row)} \\\\" for row in (header, *rows)]
    lines = ["% needs \\usepackage{booktabs}", f"\\begin{{tabular}}{{{columns}}}", "\\toprule", body[0], "\\midrule"]
    text = "\n".join([*lines, *body[1:], "\\bottomrule", "\\end{tabular}\n"])
    stem.with_suffix(".tex").write_text(text, encoding="utf-8")


def latex(text: str, *, prose: bool = False) -> str:
    """Text in which nothing is a command of LaTeX; the signs of numbers are set as such, but in prose."""
    escaped = _SPECIAL.sub(lambda found: _LATEX[found[0]], visible(text))
    return escaped if prose else _SIGN.sub(r"$\1$", escaped)


def _inert(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    text = visible(text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text
