"""The README keeps its word: its code runs, its links lead somewhere, its commands exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(example, names)
    # One token of six liked better by 0.1: the sequence ratio of GSPO is exp(0.1 / 6), clipped from above at 1 + 4e-4
    # because its advantage is 1.5; the three others have ratio 1 and advantage -0.5. Mean over four sequences, negated.
    assert names["loss"] == pytest.approx(-(1.5 * (1 + 4e-4) - 3 * 0.5) / 4, abs=1e-6)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_commands_exist():
    modules = set(re.findall(r"python -m (jaxrl_llm[\w.]*)", README))
    assert modules
    assert {name for name in modules if importlib.util.find_spec(name) is None} == set()
    configs = set(re.findall(r"configs/\w+\.py", README))
    assert {name for name in configs if not (ROOT / name).exists()} == set()


def test_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"make ([a-z][\w-]*)", README + (ROOT / "CONTRIBUTING.md").read_text()))
    assert {name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)} == set()
