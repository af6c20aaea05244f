"""A page that is written once and comes out as Markdown and as one self-contained HTML file."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

__all__ = ["Page", "text_table"]

_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #2b2b2b; max-width: 1080px; margin: 2.5rem auto;
  padding: 0 1.2rem }
h1 { font-size: 1.7rem; line-height: 1.25 }
h2 { margin-top: 2.4rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem }
table { border-collapse: collapse; font-size: .88rem; margin: 1rem 0; display: block; overflow-x: auto }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #e8e8e8; white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { border-bottom: 2px solid #999; font-weight: 600 }
figure { margin: 1rem 0 } figure img { max-width: 100%; height: auto } figcaption { font-size: .88rem; color: #555 }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .8rem; line-height: 1.4 }
"""


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to one width: the first to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *(line(row) for row in rows)])


class Page:
    """Collects blocks in both forms; pictures are PNG files beside the Markdown and inlined in the HTML.

    Args:
        folder: where report.md, report.html and figures/ are written.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._markdown: list[str] = []
        self._html: list[str] = []
        self._title = "report"
        (folder / "figures").mkdir(parents=True, exist_ok=True)

    def heading(self, text: str, level: int = 2) -> None:
        self._title = text if level == 1 else self._title
        self._add(f"{'#' * level} {text}", f"<h{level}>{html.escape(text)}</h{level}>")

    def text(self, text: str) -> None:
        self._add(text, f"<p>{html.escape(text)}</p>")

    def bullets(self, lines: Sequence[str]) -> None:
        items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
        self._add("\n".join(f"- {line}" for line in lines), f"<ul>{items}</ul>")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        def cells(tag: str, row: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

        lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
        escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        body = "".join(cells("td", row) for row in rows)
        self._add(
            "\n".join("| " + " | ".join(line) + " |" for line in escaped),
            f"<table><thead>{cells('th', header)}</thead><tbody>{body}</tbody></table>",
        )

    def code(self, text: str) -> None:
        fence = "```" if "```" not in text else "~~~~"
        self._add(f"{fence}\n{text}\n{fence}", f"<pre>{html.escape(text)}</pre>")

    def picture(self, figure: Figure, stem: str, alt: str, caption: str) -> Path:
        path = self._folder / "figures" / f"{stem}.png"
        # No creation date and no software version: the same numbers give the same file.
        figure.savefig(path, metadata={"Software": None})
        inline = base64.b64encode(path.read_bytes()).decode()
        image = f'<img alt="{html.escape(alt, quote=True)}" src="data:image/png;base64,{inline}">'
        self._add(
            f"![{alt}](figures/{path.name})\n\n*{caption}*",
            f"<figure>{image}<figcaption>{html.escape(caption)}</figcaption></figure>",
        )
        return path

    def write(self) -> tuple[Path, Path]:
        """Write report.md and report.html and return their paths."""
        markdown, page = self._folder / "report.md", self._folder / "report.html"
        markdown.write_text("\n\n".join(self._markdown) + "\n", encoding="utf-8")
        head = f'<meta charset="utf-8"><title>{html.escape(self._title)}</title><style>{_STYLE}</style>'
        body = "\n".join(self._html)
        page.write_text(f'<!doctype html><html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n', "utf-8")
        return markdown, page

    def _add(self, markdown: str, page: str) -> None:
        self._markdown.append(markdown)
        self._html.append(page)
