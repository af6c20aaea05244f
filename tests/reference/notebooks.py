"""The notebooks of colab/: NAME.py is the source, NAME.ipynb its pair with the outputs of a run.

`python -m tests.reference.notebooks [NAME ...]` runs the notebooks of these names and stores their outputs, without
what they say of the machine. Before that, and without a name only that, it writes the opening of colab/install.py into
all sources, with the address of [project.urls] and the badge that follows from it, and the words of all sources into
their pairs, whose outputs stay.
"""

import base64
import io
import os
import re
import resource
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from PIL import Image

ROOT = Path(__file__).parents[2]
NAMES = ("objectives", "mixture", "compare", "published_model", "your_own", "second_opinion")  # in reading order
_WIDGET = "application/vnd.jupyter.widget-view+json"
_BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
_MACHINE = (  # what a stored text says of the machine, and what stands there instead
    (re.compile(re.escape(str(Path.home())) + r"\b"), "~"),
    (re.compile(r"  tokens/s [\d,]+"), ""),
    (re.compile(r"  (\d+:)?\d\d:\d\d<(\d+:)?\d\d:\d\d"), ""),
    (re.compile(r" of [\d.]+ GB a device"), " a device"),
    (re.compile(r"(?<![\d,])\d{1,3},\d{3}(?![\d,])"), lambda found: "-".rjust(len(found[0]))),  # a table's tokens/s
)


def path_of(name: str) -> Path:
    return ROOT / "colab" / f"{name}.ipynb"


def public_address() -> str:
    """The entry Repository of [project.urls]; "" while there is none."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"].get("Repository", "")


def opening(name: str, address: str) -> list[str]:
    """The sources of the cells that follow a notebook's title: words, with the badge of an address, and code."""
    words, code = (cell.source for cell in jupytext.read(ROOT / "colab" / "install.py").cells)
    if address.startswith("https://github.com/"):  # Colab opens notebooks from nowhere else by address
        repository = address.removeprefix("https://").removesuffix(".git")
        link = f"https://colab.research.google.com/{repository.replace('.com', '', 1)}/blob/main/colab/{name}.ipynb"
        words = f"[![Open in Colab][badge]][colab]\n\n{words}\n\n[badge]: {_BADGE}\n[colab]: {link}"
    return [words, code.replace('ADDRESS = ""', f'ADDRESS = "{address}"')]


def execute(book: nbformat.NotebookNode, folder: Path) -> tuple[float, float]:
    """Run a notebook in a folder, with this checkout's package; returns the seconds, and those of CPU cores."""
    from nbclient import NotebookClient

    began, spent = time.monotonic(), _cpu_of_children()
    client = NotebookClient(book, timeout=3600, coalesce_streams=True, resources={"metadata": {"path": str(folder)}})
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # the tests' save compilation
    own |= {"PIP_QUIET": "3"}  # its warnings name the indexes of this machine
    client.execute(env=own | {"PYTHONPATH": os.pathsep.join(paths)})
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = [still for output in cell.outputs for still in _still(output, client.widget_state)]
    return time.monotonic() - began, _cpu_of_children() - spent


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # those that have ended
    return used.ru_utime + used.ru_stime


def _still(output: nbformat.NotebookNode, widgets: dict[str, Any]) -> list[Any]:
    """The output itself; of a widget, which is nothing without a kernel, what it shows below its sliders."""
    if _WIDGET not in output.get("data", {}):
        return [output]
    state = widgets[output.data[_WIDGET]["model_id"]]
    inside = [widgets[child.removeprefix("IPY_MODEL_")] for child in state.get("children", [])]
    return [nbformat.from_dict(shown) for part in (state, *inside) for shown in part.get("outputs", [])]


def _in_few_colours(picture: str) -> str:
    """A picture with 256 colours, which a plot does not exceed by much: a third of the bytes."""
    small = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").quantize(256).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def neutral(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without what its outputs say of the machine that ran it, and with small pictures."""
    for cell in book.cells:
        cell.pop("id", None)  # drawn anew at every run
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            for holder, key in ((output, "text"), (output.get("data", {}), "text/plain")):
                for pattern, instead in _MACHINE if key in holder else ():
                    holder[key] = pattern.sub(instead, holder[key])
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = _in_few_colours(output.data["image/png"])
    book.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    book.nbformat_minor = 4  # the last without ids of cells
    return book


def renew_words(name: str) -> None:
    """Write the opening into a source, and all but its other code into the pair, where there is one."""
    path = path_of(name)
    source = jupytext.read(path.with_suffix(".py"))
    for cell, text in zip(source.cells[1:3], opening(name, public_address()), strict=True):
        cell.source = text
    jupytext.write(source, path.with_suffix(".py"), fmt="py:percent")
    if path.exists():
        pair = nbformat.read(path, as_version=4)
        for place, (cell, new) in enumerate(zip(pair.cells, source.cells, strict=True)):
            if place == 2 or new.cell_type == "markdown":
                cell.source = new.source
        nbformat.write(pair, path)


def store(name: str) -> tuple[float, float]:
    """Run a source and write its pair; returns what `execute` does."""
    book = jupytext.read(path_of(name).with_suffix(".py"))
    with tempfile.TemporaryDirectory() as folder:
        seconds = execute(book, Path(folder))
    nbformat.write(neutral(book), path_of(name))
    return seconds


if __name__ == "__main__":
    for name in NAMES:
        renew_words(name)
    for name in sys.argv[1:]:
        seconds, cores = store(name)
        print(f"{name}: {seconds:.0f} s, {cores:.0f} of CPU cores", flush=True)
