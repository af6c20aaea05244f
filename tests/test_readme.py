"""The pages keep their word: README's code runs; links, commands, files and modules that a page names exist."""

import re
from pathlib import Path

import pytest

import jaxrl_llm

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*/*.md")))


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(example, names)
    # One token of six liked better by 0.1: the sequence ratio of GSPO is exp(0.1 / 6), clipped from above at 1 + 4e-4
    # because its advantage is 1.5; the three others have ratio 1 and advantage -0.5. Mean over four sequences, negated.
    assert names["loss"] == pytest.approx(-(1.5 * (1 + 4e-4) - 3 * 0.5) / 4, abs=1e-6)


def test_readme_is_short():
    """At most 700 words before the links. `experiments/test_study_page.py` holds the findings to their tables."""
    before, _ = README.split("## Where to go next")
    assert len([word for word in before.split() if re.search("[A-Za-z]", word)]) <= 700


def test_one_version():
    """Of the package, the citation and the newest changes."""
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert jaxrl_llm.__version__ == newest == cited


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_every_notebook_is_counted(page):
    (number,) = re.findall(r"(\w+) \[?notebooks\b", (ROOT / page).read_text())
    assert {"five": 5, "six": 6, "seven": 7}[number] == len([*ROOT.glob("colab/*.ipynb")])


def anchors(page):
    """What a link may name behind # on a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    dead = []
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def missing(page, text):
    """The Python files and modules that a text names and that are not there; NAME stands for any name.

    A file is named from the root, from the package or from the page's folder, a module by its dotted name, perhaps with
    something that it defines behind it.
    """
    gone = {
        path
        for path in re.findall(r"(?<![\w/.])(?:[\w-]+/)+[\w-]+\.py\b", text)
        if not any((folder / path).exists() for folder in (ROOT, ROOT / "jaxrl_llm", page.parent))
    }
    for name in re.findall(r"(?<![\w/.])(?:jaxrl_llm|experiments|tests)(?:\.\w+)+", text):
        path = ROOT / name.replace(".", "/")
        if not path.is_dir() and not path.with_suffix(".py").exists():
            holder = path.parent / "__init__.py" if path.parent.is_dir() else path.parent.with_suffix(".py")
            if not holder.exists() or not re.search(rf"\b{path.name}\b", holder.read_text()):
                gone.add(name)
    return {name for name in gone if not re.search(r"[A-Z]{4}", name)}


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "CHANGELOG.md"],  # it names what was
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_named_files_and_modules_exist(page):
    assert missing(page, page.read_text()) == set()


def test_the_search_sees_what_is_gone():
    there = {
        "jaxrl_llm/main.py",
        "objectives/recipes.py",
        "configs/NAME.py",
        "jaxrl_llm.sweep",
        "jaxrl_llm.objectives.make",
    }
    assert missing(ROOT / "README.md", " ".join(there)) == set()
    gone = {"jaxrl_llm/mane.py", "objectives/receipt.py", "jaxrl_llm.sweeping", "jaxrl_llm.objectives.forge"}
    assert missing(ROOT / "README.md", " ".join(gone)) == gone


def test_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"make ([a-z][\w-]*)", README + (ROOT / "CONTRIBUTING.md").read_text()))
    assert {name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)} == set()
