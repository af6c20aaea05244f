"""docs/tasks.md is executed: its table against the verifiers, its code as it stands, a new task included."""

import inspect
import re
from pathlib import Path

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.run.settings import validate
from jaxrl_llm.tasks import named_tasks
from jaxrl_llm.tasks.named_tasks import BUILT_IN

TEXT = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
ROWS = [
    tuple(cell.strip().strip("`") for cell in line.split("|")[1:5]) for line in TEXT.splitlines() if "=` | `" in line
]

TEXTUAL = re.findall(r"^\| `(jsonl|gsm8k|reasoning_gym)` \| `([^`]*)` \|", TEXT, re.MULTILINE)


ENVIRONMENTS = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
OVER_TURNS = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| `[^|]*` -> ", ENVIRONMENTS, re.MULTILINE)


def test_the_tables_list_every_task():
    assert sorted(name for name, *_ in [*ROWS, *TEXTUAL, *OVER_TURNS]) == sorted(BUILT_IN)


@pytest.mark.parametrize(("name", "options", "prompt", "answer"), ROWS)
def test_a_row_of_the_table_is_true(name, options, prompt, answer):
    task = tasks.make(name)
    shown = ", ".join(f"{option}={value!r}".replace("'", '"') for option, value in task.options.items())
    assert options == shown
    assert list(task.options) == list(inspect.signature(BUILT_IN[name]).parameters)
    assert task.verify(prompt, answer, answer, {}) == 1.0
    assert len(task.tokenizer.encode(prompt)) <= task.prompt_length


@pytest.mark.parametrize(("name", "options"), [*TEXTUAL, *OVER_TURNS])
def test_the_options_of_other_tasks_are_listed(name, options):
    defaults = {option: p.default for option, p in inspect.signature(BUILT_IN[name]).parameters.items()}
    assert options == ", ".join(f"{option}={value!r}".replace("'", '"') for option, value in defaults.items())


def test_the_code_runs_and_adds_a_task(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(named_tasks, "_REGISTERED", {})
    namespace = {"__name__": "tasks_of_the_docs"}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(block, namespace)
    assert "reverse" in tasks.names()
    assert namespace["batch"]["tokens"].shape == (4, 4)
    settings = validate(namespace["get_config"]("smoke"))
    assert 8 ** settings.task.options["letters"] > 4 * settings.task.options.get("train_size", 8192)  # so many words
