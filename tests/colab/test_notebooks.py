"""Every notebook runs from its first cell to its last, in its smallest form, and is stored without outputs."""

import os
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_as_a_pair_without_outputs(path):
    book = nbformat.read(path, as_version=4)
    pair = jupytext.read(path.with_suffix(".py"))
    assert [(c.cell_type, c.source) for c in book.cells] == [(c.cell_type, c.source) for c in pair.cells]
    assert all(not cell.get("outputs") for cell in book.cells)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs(path, tmp_path):
    book = nbformat.read(path, as_version=4)
    environment = os.environ | {"NOTEBOOK_VARIANT": "smoke", "NOTEBOOK_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute(
        env=environment
    )
    pictures = [o for c in book.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 4
    assert (tmp_path / "GRPO+R2" / "result.json").exists()
