"""Steps of MkDocs beyond docs/: the gallery, notebooks, pages of other folders, and the links between them."""

import posixpath
import re
import tomllib
from pathlib import Path

import nbformat
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter

from docs.site import gallery

ROOT = Path(__file__).parents[2]
OTHERS = ("*.md", "experiments/**/*.md", "experiments/**/*.png", "experiments/**/*.svg")
# In this order, others before them.
LESSONS = ["objectives", "mixture", "compare", "published_model", "your_own", "second_opinion"]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"), key=lambda path: [path.stem == name for name in LESSONS][::-1])
# Within a cell of a table; where it wraps, a row of intervals grows tall and narrow.
INTERVAL = re.compile(r"(?:[-+]?\d[\d.e-]* )?\[[-+]?\d[\d.e-]*, [-+]?\d[\d.e-]*\](?= *(?:[,;<]|$))", re.MULTILINE)
LINK = re.compile(r"(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")


def on_config(config):
    """Every notebook of colab/ is a tutorial, and links to the code need the public address."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    config.repo_url = urls.get("Repository")
    tutorials = next(entry["Tutorials"] for entry in config.nav if "Tutorials" in entry)
    tutorials += [f"colab/{path.stem}.md" for path in NOTEBOOKS]
    return config


def on_files(files, config):
    for pattern in OTHERS:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for path in NOTEBOOKS:
        text, pictures = _notebook(path)
        files.append(File.generated(config, f"colab/{path.stem}.md", content=text))
        for name, data in pictures.items():
            files.append(File.generated(config, f"colab/{name}", content=data))
    files.append(File.generated(config, "site/gallery.md", content=gallery.page()))
    return files


@event_priority(100)
def on_page_markdown(markdown, page, config, files):
    """A link between two files of the repository, as a link between two pages; to a file that is no page, its text."""
    here = page.file.src_uri
    inside = (ROOT / "docs" / here).exists() or here == "site/gallery.md"
    folder = posixpath.dirname(f"docs/{here}" if inside else here)

    def moved(match):
        text, link = match.groups()
        path, _, anchor = link.partition("#")
        if not path or re.match(r"\w+:", path):
            return match[0]
        target = posixpath.normpath(posixpath.join(folder, path))
        uri = re.sub(r"^(colab/.*)\.ipynb$", r"\1.md", target.removeprefix("docs/"))  # shown as a tutorial
        if files.get_file_from_path(uri) is None:
            return f"{text}({config.repo_url}/blob/main/{target})" if config.repo_url else text[1:-1]
        relative = posixpath.relpath(uri, posixpath.dirname(here) or ".")
        return f"{text}({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(moved, markdown)


def on_page_content(html, page, config, files):
    """In a cell an interval stays on one line, and a bar in code loses what kept it from ending the cell."""

    def told(cell):
        return INTERVAL.sub(r'<span class="whole">\g<0></span>', cell[0].replace("\\|", "|"))

    return re.sub(r"<td.*?</td>", told, html)


def on_post_page(output, page, config):
    """The theme's search has a role and no name, which a screen reader needs."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def _notebook(path):
    """A notebook with its stored outputs as Markdown, and its pictures by name."""
    book = nbformat.read(path, as_version=4)
    book.metadata.setdefault("language_info", {"name": "python"})  # what the cells are highlighted as
    resources = {"unique_key": path.stem, "output_files_dir": path.stem}
    text, resources = MarkdownExporter().from_notebook_node(book, resources)
    return text, resources["outputs"]
