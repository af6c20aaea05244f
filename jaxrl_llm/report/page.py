"""A page that is rendered both as Markdown and as one self-contained HTML file (templates/)."""

import base64
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from jaxrl_llm.ground.terminal import visible

_CONTENTS = 30  # with more headings the contents list only those of the second level


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """A table for the terminal: the first column is aligned left, the others right.

    If lines would be longer than `width`, the remaining columns follow below, with the first one repeated.
    """
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    blocks, used = [[0]], widths[0]
    for i in range(1, len(header)):
        if width is not None and used + 2 + widths[i] > width and len(blocks[-1]) > 1:
            blocks.append([0])
            used = widths[0]
        blocks[-1].append(i)
        used += 2 + widths[i]

    def line(cells: Sequence[str], columns: Sequence[int]) -> str:
        return "  ".join(cells[i].rjust(widths[i]) if i else cells[i].ljust(widths[i]) for i in columns).rstrip()

    lines = [header, ["-" * w for w in widths], *rows]
    return "\n\n".join("\n".join(line(cells, columns) for cells in lines) for columns in blocks)


def _plain(text: str) -> str:
    """Text for Markdown in which nothing is HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _cell(text: str, prose: bool) -> str:
    """Text for a cell of a table in Markdown; prose may be of others, and shows no link and no picture."""
    text = _plain(text).replace("|", "\\|").replace("\n", " ")
    return text.replace("[", "&#91;") if prose else text


class Page:
    """Blocks that `write` renders in both forms, in the folder. Pictures are PNG files, inlined in the HTML."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._blocks: list[dict[str, Any]] = []
        self._anchors: Counter[str] = Counter()
        try:
            (folder / "figures").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"DIR={folder} cannot be written ({error}); copy it to a folder that can") from error

    def heading(self, text: str, level: int = 2) -> None:
        plain = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") or "section"  # as Markdown renderers name them
        self._anchors[plain] += 1
        anchor = plain if self._anchors[plain] == 1 else f"{plain}-{self._anchors[plain] - 1}"
        self._add("heading", text=text, level=level, anchor=anchor)

    def contents(self) -> None:
        """Links to every heading but the title, including those that are added later."""
        self._add("contents")

    def text(self, text: str) -> None:
        self._add("text", text=text)

    def bullets(self, lines: Sequence[str]) -> None:
        self._add("bullets", lines=lines)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], *, prose: bool = False) -> None:
        """`prose`: the cells hold text, which may wrap and is aligned left."""
        self._add("table", header=header, rows=rows, prose=prose)

    def code(self, text: str) -> None:
        self._add("code", text=text)

    def picture(self, figure: Figure, stem: str, alt: str, caption: str) -> None:
        path = self._folder / "figures" / f"{stem}.png"
        # No creation date and no software version: the same numbers give the same file.
        figure.savefig(path, metadata={"Software": None})
        inline = base64.b64encode(path.read_bytes()).decode()
        self._add("picture", alt=alt, caption=caption, file=path.name, inline=inline)

    def write(self) -> tuple[Path, Path]:
        """Write report.md and report.html and return their paths."""
        headings = [block for block in self._blocks if block["kind"] == "heading"]
        deepest = 3 if len(headings) <= _CONTENTS else 2
        listed = [heading for heading in headings if 1 < heading["level"] <= deepest]
        title = next((heading["text"] for heading in headings if heading["level"] == 1), "report")
        environment = jinja2.Environment(  # an undefined name is an error
            loader=jinja2.PackageLoader("jaxrl_llm.report"),
            autoescape=jinja2.select_autoescape(["html.j2"]),
            undefined=jinja2.StrictUndefined,
            keep_trailing_newline=True,
        )
        environment.filters |= {"plain": _plain, "cell": _cell}  # in Markdown, which Jinja does not escape
        paths = self._folder / "report.md", self._folder / "report.html"
        for path in paths:
            template = environment.get_template(f"page{path.suffix}.j2")
            text = template.render(blocks=self._blocks, headings=listed, title=title)
            text = re.sub(r"\n{3,}", "\n\n", text) if path.suffix == ".md" else text
            path.write_text(visible(text.strip()) + "\n", encoding="utf-8")
        return paths

    def _add(self, kind: str, **values: Any) -> None:
        self._blocks.append({"kind": kind, **values})
