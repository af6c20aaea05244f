"""docs/preferences.md: its code runs, its tables list every recipe, hyper-parameter, metric and rule."""

import dataclasses
import re
from pathlib import Path

import jax.numpy as jnp

from jaxrl_llm import objectives
from jaxrl_llm.ground.metrics import finalize
from jaxrl_llm.tasks.preference import CORRUPTIONS, PairRules

TEXT = (Path(__file__).parents[1] / "docs" / "preferences.md").read_text()


def rows(first_cell):
    """The rows of the table whose head begins with this cell, as {name: cells} for each name in the first cell."""
    lines = TEXT.split(f"| {first_cell} |", 1)[1].splitlines()[2:]
    table = {}
    for line in lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        table |= dict.fromkeys(re.findall(r"`([\w/]+)`", cells[0]), cells[1:])
    return table


def test_the_code_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names: dict = {"__name__": "documented"}
    for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(code, names)
    assert names["batch"]["tokens"].shape == (16, names["task"].prompt_length + names["task"].answer_length)


def test_every_recipe_is_listed_with_its_aggregation():
    table = rows("recipe")
    assert list(table) == objectives.names("pairs")
    for name, cells in table.items():
        assert f"`{objectives.hyperparameters(name)['aggregation']}`" == cells[2], name


def test_every_hyperparameter_is_documented():
    known = {key for name in objectives.names("pairs") for key in objectives.hyperparameters(name)}
    assert known == set(rows("hyper-parameter"))


def test_every_rule_is_documented_with_its_default():
    table = rows("field of `PairRules`")
    assert list(table) == [field.name for field in dataclasses.fields(PairRules)]
    for field in dataclasses.fields(PairRules):
        default = field.default if isinstance(field.default, str) else f"{field.default:g}"
        assert table[field.name][0].strip("`") == default, field.name
    assert all(f"`{name}`" in table["corruption"][1] for name in CORRUPTIONS)


def test_every_metric_is_documented():
    arrays = dict.fromkeys(("logprobs", "ref_logprobs", "scores"), jnp.zeros((2, 3)))
    seen = set()
    for name, extra in (("dpo", {"nll_coef": 1.0}), ("reward_model", {"center_rewards_coefficient": 0.1})):
        seen |= finalize(objectives.make(name, **extra)(**arrays, mask=jnp.ones((2, 3), bool))[1]).keys()
    assert seen == set(rows("key"))
