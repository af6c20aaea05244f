"""What a reader may rely on in every file: its size, an honest name, no trace of the machine it was written on."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "lib", "core", "misc", "logging"}
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".json",
    ".jsonl",
    ".csv",
    ".yml",
    ".yaml",
    ".html",
    ".ipynb",
    ".svg",
    ".cfg",
    "",
}
MACHINE = re.compile(r"(?<![\w./])/(?:root|home|Users|work|tmp|opt|mnt)/\w")
INDEX = re.compile(r"(?i)--(?:extra-)?index-url|--find-links|^-e |file://", re.MULTILINE)


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def tracked() -> list[Path]:
    """The files of the project: what git knows, or in an unpacked archive what lies in its own folders."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    folders = ("jaxrl_llm", "configs", "experiments", "tests", "docs", "colab")
    inside = (path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts)
    return [path for path in (*ROOT.glob("*"), *inside) if path.is_file()]


def test_no_file_is_long():
    lengths = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for path in sources("jaxrl_llm", "configs", "experiments", "tests")
    }
    assert {path: n for path, n in lengths.items() if n > 400} == {}, "split these by what they do"


def test_module_names_say_something():
    assert [path for path in sources("jaxrl_llm", "configs", "experiments") if path.stem in FORBIDDEN_NAMES] == []


def test_test_files_mirror_the_package():
    rooms = {path.name for path in (ROOT / "jaxrl_llm").iterdir() if path.is_dir()} | {"golden", "reference"}
    found = {path.relative_to(ROOT / "tests").parts[0] for path in sources("tests") if path.parent != ROOT / "tests"}
    assert found <= rooms | {"configs", "experiments", "colab"}


def test_what_is_private_stays_in_its_module():
    """A name without an underscore is what a module offers; only a room's __init__ lists names for others."""
    wanted = re.compile(r"from jaxrl_llm[\w.]* import [^\n]*\b_[a-z]|\b(?:import|from) jaxrl_llm[\w.]*\._[a-z]")
    taken = {
        path.relative_to(ROOT): match[0] for path in sources("jaxrl_llm") if (match := wanted.search(path.read_text()))
    }
    assert taken == {}


@pytest.mark.parametrize(
    ("pattern", "meaning"),
    [(MACHINE, "a path of one machine"), (INDEX, "a package index or a local install")],
    ids=["path", "index"],
)
def test_nothing_names_a_machine(pattern, meaning):
    files = [path for path in tracked() if path.suffix in TEXT and path != Path(__file__)]
    found = {
        str(path.relative_to(ROOT)): match[0]
        for path in files
        if (match := pattern.search(path.read_text(errors="replace")))
    }
    assert found == {}, meaning


def test_patterns_see_what_they_should():
    assert MACHINE.search("workdir = '/tmp/x'")
    assert not MACHINE.search("reward/mean of runs/home/x, https://example.org/home/x")
    assert INDEX.search("-e .")
    assert INDEX.search("--extra-index-url x")


def test_docstrings_open_with_a_phrase_that_stands_alone():
    """An imperative or a noun phrase."""
    riddles = {"Of", "What", "Whether", "Where", "Those", "As"}
    found = []
    for path in sources("jaxrl_llm", "configs", "experiments", "docs", "colab"):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and text.split()[0] in riddles:
                    found.append(f"{name}: {text.splitlines()[0]}")
    assert found == []
