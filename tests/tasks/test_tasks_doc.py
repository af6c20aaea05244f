"""docs/tasks.md is executed: its table against the verifiers, its code as it stands, a new task included."""

import inspect
import re
from pathlib import Path

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks import base

TEXT = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
ROWS = [
    tuple(cell.strip().strip("`") for cell in line.split("|")[1:5]) for line in TEXT.splitlines() if "=` | `" in line
]


def test_the_table_lists_every_task():
    assert sorted(row[0] for row in ROWS) == ["addition", "countdown", "modular", "sort", "subtraction"]


@pytest.mark.parametrize(("name", "options", "prompt", "answer"), ROWS)
def test_a_row_of_the_table_is_true(name, options, prompt, answer):
    task = tasks.make(name)
    shown = ", ".join(f"{option}={value!r}".replace("'", '"') for option, value in task.options.items())
    assert options == shown
    assert list(task.options) == list(inspect.signature(base._REGISTRY[name]).parameters)
    assert task.verify(prompt, answer) == 1.0
    assert len(task.tokenizer.encode(prompt)) <= task.prompt_length


def test_the_code_runs_and_adds_a_task(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    namespace = {"__name__": "tasks_of_the_docs"}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(block, namespace)
    assert "reverse" in tasks.names()
    assert namespace["batch"]["tokens"].shape == (4, 4)
