"""Every notebook runs from its first cell to its last, in its smallest form, and is stored without outputs."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_as_a_pair_without_outputs(path):
    import jupytext

    book = nbformat.read(path, as_version=4)
    pair = jupytext.read(path.with_suffix(".py"))
    assert [(c.cell_type, c.source) for c in book.cells] == [(c.cell_type, c.source) for c in pair.cells]
    assert all(not cell.get("outputs") for cell in book.cells)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs(path, tmp_path):
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    environment = os.environ | {"NOTEBOOK_VARIANT": "smoke", "NOTEBOOK_DIR": str(tmp_path)}
    environment.pop("PYTHONPATH", None)  # the first cell finds the checkout by itself
    NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute(env=environment)
    pictures = [o for c in book.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 4
    assert (tmp_path / "GRPO+R2" / "result.json").exists()


def first_cell(path):
    return next(cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code").source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_address_is_that_of_the_package(path, tmp_path, monkeypatch):
    """[project.urls] is the one place. Without an address, the first cell says what is missing and clones nothing."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert f'get("JAXRL_LLM_REPOSITORY", "{urls.get("Repository", "")}")' in first_cell(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXRL_LLM_REPOSITORY", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"no public address .*: install its wheel, or set JAXRL_LLM_REPOSITORY"):
        exec(first_cell(path), {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_an_installed_package_is_enough(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", None)  # would fail
    before = [*sys.path]
    exec(first_cell(path), {})
    assert sys.path == before


@pytest.mark.parametrize("device", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_first_cell_installs_what_the_runtime_needs(path, device, tmp_path, monkeypatch):
    """From an empty folder without the package it clones the repository and installs it with the runtime's extra."""
    done, exists = [], Path.exists
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(subprocess, "run", lambda command, check: done.append(command))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: name if device == "gpu" else None)
    monkeypatch.setattr(Path, "exists", lambda self: device == "tpu" if self.parts[1:2] == ("dev",) else exists(self))
    monkeypatch.setenv("JAXRL_LLM_REPOSITORY", "https://example.org/jaxrl_llm")
    exec(first_cell(path), {})
    clone, install = done
    assert clone[:2] == ["git", "clone"]
    extras = "colab" if device == "cpu" else f"colab,{device}"
    assert install[-1] == f"{clone[-1]}[{extras}]"
