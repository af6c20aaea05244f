"""A page that is rendered both as Markdown and as one self-contained HTML file (templates/)."""

import base64
import csv
import functools
import html
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from jaxrl_llm.ground.machine import refuse_links
from jaxrl_llm.ground.terminal import visible

if TYPE_CHECKING:  # it takes a second to import, and text_table does without
    from matplotlib.figure import Figure

_CONTENTS = 30  # with more headings the contents list only those of the second level


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None, *, keys: int = 1) -> str:
    """A table for the terminal: the first column is aligned left, the others right.

    If lines would be longer than `width`, the remaining columns follow below, with the first `keys` columns repeated.
    """
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    first = list(range(keys))
    blocks, repeated = [[*first]], sum(widths[:keys]) + 2 * (keys - 1)
    used = repeated
    for i in range(keys, len(header)):
        if width is not None and used + 2 + widths[i] > width and len(blocks[-1]) > keys:
            blocks.append([*first])
            used = repeated
        blocks[-1].append(i)
        used += 2 + widths[i]

    def line(cells: Sequence[str], columns: Sequence[int]) -> str:
        return "  ".join(cells[i].rjust(widths[i]) if i else cells[i].ljust(widths[i]) for i in columns).rstrip()

    lines = [header, ["-" * w for w in widths], *rows]
    return "\n\n".join("\n".join(line(cells, columns) for cells in lines) for columns in blocks)


def _cell(text: str, prose: bool) -> str:
    """Text for a cell of a table in Markdown; prose may be of others, and shows no link and no picture."""
    text = html.escape(text, quote=False).replace("|", "\\|").replace("\n", " ")
    return text.replace("[", "&#91;") if prose else text


def _inert(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    text = visible(text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text


def save_vectors(figure: "Figure", path: Path) -> None:
    """Write an SVG and a PDF beside the PNG that has just been saved, laid out like it.

    The same numbers give the same files: no date, no version, fixed ids.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure.set_layout_engine("none")
    # Journals refuse the default fonts of type 3. Each canvas draws by itself: `savefig` would draw everything twice.
    with rc_context({"svg.hashsalt": "jaxrl_llm", "pdf.fonttype": 42}):
        FigureCanvasSVG(figure).print_svg(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
        origin = dict.fromkeys(("CreationDate", "Creator", "Producer"))
        FigureCanvasPdf(figure).print_pdf(path.with_suffix(".pdf"), metadata=origin)


def environment() -> jinja2.Environment:
    """The renderer of templates/: an undefined name is an error, and HTML is escaped."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("jaxrl_llm.report"),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    # In Markdown, which Jinja does not escape.
    made.filters |= {"plain": functools.partial(html.escape, quote=False), "cell": _cell}
    return made


class Page:
    """Blocks that `write` renders in both forms, in the folder.

    Pictures are inlined in the HTML as PNG; figures/ has them as PNG, SVG and PDF, tables/ each table as CSV.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._blocks: list[dict[str, Any]] = []
        self._anchors: Counter[str] = Counter()
        refuse_links(folder, folder / "figures", folder / "tables")
        try:
            for kind in ("figures", "tables"):
                (folder / kind).mkdir(parents=True, exist_ok=True)
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

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], stem: str, *, prose: bool = False) -> None:
        """Add a table and its file tables/STEM.csv; `prose`: the cells hold text of others, which may wrap."""
        shown = _inert if prose else visible
        with (self._folder / "tables" / f"{stem}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([[*map(shown, row)] for row in (header, *rows)])
        self._add("table", header=header, rows=rows, prose=prose)

    def code(self, text: str) -> None:
        self._add("code", text=text)

    def picture(self, figure: "Figure", stem: str, alt: str, caption: str) -> None:
        path = self._folder / "figures" / f"{stem}.png"
        figure.savefig(path, metadata={"Software": None})
        save_vectors(figure, path)
        inline = base64.b64encode(path.read_bytes()).decode()
        self._add("picture", alt=alt, caption=caption, file=path.name, inline=inline)

    def write(self, stem: str = "report") -> tuple[Path, Path]:
        """Write STEM.md and STEM.html and return their paths."""
        headings = [block for block in self._blocks if block["kind"] == "heading"]
        deepest = 3 if len(headings) <= _CONTENTS else 2
        listed = [heading for heading in headings if 1 < heading["level"] <= deepest]
        title = next((heading["text"] for heading in headings if heading["level"] == 1), "report")
        paths = self._folder / f"{stem}.md", self._folder / f"{stem}.html"
        for path in paths:
            template = environment().get_template(f"page{path.suffix}.j2")
            text = template.render(blocks=self._blocks, headings=listed, title=title)
            text = re.sub(r"\n{3,}", "\n\n", text) if path.suffix == ".md" else text
            path.write_text(visible(text.strip()) + "\n", encoding="utf-8")
        return paths

    def _add(self, kind: str, **values: Any) -> None:
        self._blocks.append({"kind": kind, **values})
