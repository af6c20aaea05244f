"""docs/objectives.md: its code runs, its table is the code's, its own objective is one like the others."""

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground.declared import declarations
from jaxrl_llm.ground.metrics import finalize
from jaxrl_llm.objectives import advantages
from jaxrl_llm.objectives import registry as known
from jaxrl_llm.objectives.named_parts import ADVANTAGES
from jaxrl_llm.run.settings import validate
from tests.reference.answers import random_batch

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "objectives.md").read_text()
HEAD = "| name | type | recipes | default | meaning |\n| -- | -- | -- | -- | -- |"


@pytest.fixture
def registry(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(known, "_RECIPES", dict(known._RECIPES))


def block(containing):
    """The code block with this text, executed."""
    source = next(code for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if containing in code)
    names: dict = {"__name__": "documented"}
    exec(source, names)
    return names


def test_first_block_runs():
    assert np.isfinite(block("objectives.make")["loss"])


def test_bare_functions():
    names = block("surrogates.clip")
    np.testing.assert_allclose(names["clipped"], [[1.28, 0.5], [-2.0, -1.0]], rtol=1e-6)
    np.testing.assert_allclose(names["log_s"], np.log([[0.75**0.5] * 2, [2.0, 1.0]]), rtol=1e-6)


def test_own_objective():
    """Value by hand at one token, gradient weight 1 - (r - 1) sign(A) / width, and everything that comes with it."""
    mine = block("class Quadratic")["mine"]
    assert mine.needs == {"entropy"}
    one = jnp.ones((1, 1))
    arrays = {"old_logprobs": 0 * one, "mask": one > 0, "entropy": 0 * one}
    evaluate = jax.jit(lambda x, a: mine(logprobs=jnp.log(x), advantages=a, **arrays))
    loss, metrics = evaluate(1.1 * one, jnp.asarray([2.0]))
    np.testing.assert_allclose(loss, -(1.1 * 2 - 0.01 / 0.2 * 2), rtol=1e-5)
    assert finalize(metrics)["gradient_weight/positive"] == pytest.approx(1.1 * (1 - 1), abs=1e-5)
    _, metrics = evaluate(1.1 * one, jnp.asarray([-2.0]))
    assert finalize(metrics)["gradient_weight/negative"] == pytest.approx(1.1 * (1 + 1), rel=1e-5)
    batch = {key: x for key, x in random_batch().items() if "router" not in key}
    assert np.isfinite(jax.jit(lambda x: mine(**x)[0])({**batch, "entropy": jnp.zeros((4, 6))}))


def test_own_advantage(registry):
    """By hand, and the signatures of the page are those of the two advantages that stand for all."""
    names = block("class AboveMedian")
    rewards = jnp.asarray([0.0, 0.2, 0.8, 1.0])
    np.testing.assert_array_equal(names["AboveMedian"]()(rewards, group_size=4), [-1, -1, 1, 1])
    assert objectives.make("above_median").advantage == names["AboveMedian"]()
    text = TEXT.split("### An advantage")[1]
    for kind in (advantages.GroupAdvantage, advantages.Gae):
        (shown,) = re.findall(rf"^\| `{kind.needs_values}` \| `\((.*?)\)`", text, re.MULTILINE)
        given = list(inspect.signature(kind.__call__).parameters.values())[1:]
        assert shown.replace("*, ", "").split(", ") == [
            str(p).partition(":")[0] + "=None" * (p.default is None) for p in given
        ]


def test_own_config_file(registry):
    """One file makes a recipe that a config, its fields and the settings know; power 1 is GRPO, 0.5 halves log r."""
    get_config = block("def get_config")["get_config"]
    assert objectives.fields()["power"][:4] == (float, None, "exponent of the ratio; 1 is GRPO", False)
    config = get_config("smoke")
    assert config.objective.power is None
    made = validate(config).objective
    config.objective.power = 1
    batch = {key: x for key, x in random_batch().items() if "router" not in key}
    half = batch | {"logprobs": (batch["logprobs"] + batch["old_logprobs"]) / 2}
    loss = jax.jit(lambda objective, batch: objective(**batch)[0], static_argnums=0)
    grpo = objectives.make("grpo")
    np.testing.assert_allclose(loss(made, batch), loss(grpo, half), rtol=1e-5)
    np.testing.assert_allclose(loss(validate(config).objective, batch), loss(grpo, batch), rtol=1e-6)
    config.objective.power = 2.0
    with pytest.raises(ValueError, match=r"objective: power=2.0 is out of range; give power above 0 and at most 1"):
        validate(config)


def rows(heading):
    """The cells of the first table below a heading."""
    section = TEXT.split(heading, 1)[1]
    lines = [line for line in section.split("\n#", 1)[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_lists_every_recipe_with_its_aggregation():
    table = {row[0].strip("`"): row for row in rows("## Recipes")}
    assert list(table) == objectives.names("rollouts")
    for name, row in table.items():
        assert f"`{objectives.hyperparameters(name)['aggregation']}`" in row[4], name


def named(key):
    """The advantages by name that alone have this hyper-parameter."""
    return [f"advantage={name}" for name, kind in ADVANTAGES.items() if key in declarations(kind)]


def declared_default(choice, key):
    return declarations(ADVANTAGES[choice.removeprefix("advantage=")])[key].default


def table():
    """The rows of the table of hyper-parameters, from their declarations."""
    lines = []
    of = {name: objectives.hyperparameters(name) for name in objectives.names("rollouts")}
    for key, declared in objectives.fields().items():
        owners = [name for name in of if key in of[name]] or named(key)
        if not owners:  # of pairs alone: docs/preferences.md
            continue
        others = [name for name in of if name not in owners]
        where = "all" if not others else f"all but {', '.join(others)}" if len(others) < 4 else ", ".join(owners)
        values = [str(of[name][key]) if name in of else str(declared_default(name, key)) for name in owners]
        usual = max(values, key=values.count)
        own = "; ".join(f"{name} {value}" for name, value in zip(owners, values, strict=True) if value != usual)
        default = "see above" if key == "aggregation" else f"{usual} ({own})" if own else usual
        meaning = declared.comment.replace("|", "/")  # a bar would end the cell
        lines.append(f"| `{key}` | {declared.kind.__name__} | {where} | {default} | {meaning} |")
    return lines


def test_the_table_of_hyperparameters_is_the_declarations():
    """Regenerate it with `python -m tests.objectives.test_documented`."""
    assert "\n".join([HEAD, *table(), "", ""]) in TEXT
    assert all(declared.meaning for declared in objectives.fields().values())


def test_every_metric_of_an_objective_is_documented():
    text = (DOCS / "metrics.md").read_text()
    zeros = jnp.zeros((2, 3))
    names = [
        "logprobs",
        "old_logprobs",
        "ref_logprobs",
        "sampler_logprobs",
        "values",
        "old_values",
        "returns",
        "entropy",
    ]
    arrays = {**dict.fromkeys(names, zeros), "advantages": jnp.ones(2), "mask": jnp.ones((2, 3), bool)}
    found = set()
    for name, extra in (("ppo", {"kl_coef": 0.1, "correction": "tis"}), ("sapo", {})):
        objective = objectives.make(name, **extra)
        found |= finalize(jax.jit(lambda x, f=objective: f(**x)[1])(arrays)).keys()
    short = {key for key in found if f"`{key}`" not in text}
    assert short <= {"ratio/sequence_var", "ratio/sequence_max"}  # written `_var`, `_max` beside the first


if __name__ == "__main__":
    before, after = TEXT.split(HEAD)
    (DOCS / "objectives.md").write_text("\n".join([before + HEAD, *table(), after[after.index("\n\n") + 1 :]]))
