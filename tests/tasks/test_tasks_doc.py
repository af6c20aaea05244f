"""docs/tasks.md is executed: its table against the verifiers, its code as it stands, a new task included."""

import inspect
import re
from pathlib import Path

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.run.settings import validate
from jaxrl_llm.tasks import base

TEXT = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
ROWS = [
    tuple(cell.strip().strip("`") for cell in line.split("|")[1:5]) for line in TEXT.splitlines() if "=` | `" in line
]

TEXTUAL = re.findall(r"^\| `(jsonl|gsm8k|reasoning_gym)` \| `([^`]*)` \|", TEXT, re.MULTILINE)


def test_the_table_lists_every_task():
    own = [name for name in tasks.names() if base._REGISTRY[name].__module__.startswith("jaxrl_llm.")]
    assert sorted([row[0] for row in ROWS] + [row[0] for row in TEXTUAL]) == own  # other tests register theirs


@pytest.mark.parametrize(("name", "options", "prompt", "answer"), ROWS)
def test_a_row_of_the_table_is_true(name, options, prompt, answer):
    task = tasks.make(name)
    shown = ", ".join(f"{option}={value!r}".replace("'", '"') for option, value in task.options.items())
    assert options == shown
    assert list(task.options) == list(inspect.signature(base._REGISTRY[name]).parameters)
    assert task.verify(prompt, answer, answer, {}) == 1.0
    assert len(task.tokenizer.encode(prompt)) <= task.prompt_length


@pytest.mark.parametrize(("name", "options"), TEXTUAL)
def test_the_options_of_a_task_of_text_are_listed(name, options):
    defaults = {option: p.default for option, p in inspect.signature(base._REGISTRY[name]).parameters.items()}
    assert options == ", ".join(f"{option}={value!r}".replace("'", '"') for option, value in defaults.items())


def test_the_code_runs_and_adds_a_task(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    namespace = {"__name__": "tasks_of_the_docs"}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(block, namespace)
    assert "reverse" in tasks.names()
    assert namespace["batch"]["tokens"].shape == (4, 4)
    settings = validate(namespace["get_config"]("smoke"))
    assert 8 ** settings.task.options["letters"] > 4 * settings.task.options.get("train_size", 8192)  # so many words
