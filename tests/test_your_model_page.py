"""docs/your_model.md: its files do what it says, and it is found first."""

import json
import re

import yaml

from tests.reference import page_commands
from tests.reference.page_commands import ROOT, blocks

PAGE = ROOT / "docs" / "your_model.md"
ROWS, REWARD = blocks(PAGE, "python")


def test_the_files_of_the_page(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    exec(ROWS, {})
    rows = [json.loads(line) for line in (tmp_path / "capitals.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == 40
    assert rows[0] == {"prompt": "What is the capital of France?", "answer": "Paris"}
    own: dict = {}
    exec(REWARD, own)
    graded = {"The capital of France is Paris.": 1, "Lyon": 0, "It is well known to be paris, a city in Europe": 0.5}
    assert {answer: own["reward"]("", answer, "Paris", {}) for answer in graded} == graded
    assert len(REWARD.strip().splitlines()) <= 10


def test_it_comes_first_and_readme_names_it():
    nav = re.search(r"^nav:\n(.*)", (ROOT / "mkdocs.yml").read_text(), re.DOTALL | re.MULTILINE)
    assert nav
    assert list(yaml.safe_load(nav[1])[0].values()) == ["your_model.md"]
    before, _ = (ROOT / "README.md").read_text().split("## What we found")
    assert "(docs/your_model.md)" in before


def test_no_page_trains_fresh_weights_behind_a_tokenizer_of_a_checkpoint():
    for page, *arguments in page_commands.commands():
        given = " ".join(arguments)
        if "--config.task.tokenizer" in given and "jaxrl_llm.main" in given:
            assert "--config.model.pretrained" in given, f"{page}: {given}"
