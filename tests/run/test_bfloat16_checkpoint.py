"""A run from a checkpoint in bfloat16: what is trained is float32, what is frozen stays as stored, and a run that is
told to train in bfloat16 says what it loses."""

import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import stand_ins
from jaxrl_llm.check import rehearsal_rows
from jaxrl_llm.check.findings import LOOK, OK
from jaxrl_llm.check.fits import stays_of
from jaxrl_llm.check.rehearsal import rehearse
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.records.run_log import read_rows
from jaxrl_llm.run import assembly
from jaxrl_llm.run.settings import validate
from jaxrl_llm.training.sources import in_type
from tests.reference import tiny_run

TOLD = {"model.param_dtype": "bfloat16"}


def make_config(folder, **changes):
    """A run from a tiny checkpoint in bfloat16, whose types are the config's own where `changes` name none."""
    sizes = importlib.import_module("configs.pretrained")._TINY
    path = stand_ins.checkpoint(sizes | {"param_dtype": "bfloat16"})
    assert json.loads((Path(path) / "config.json").read_text())["dtype"] == "bfloat16"
    types = dict.fromkeys(("model.param_dtype", "model.dtype"))
    own = {"model.pretrained": path, "warm_start.steps": 0, "optimizer.learning_rate": 1e-6, "rollout.prompts": 4}
    return tiny_run.make_config(folder, "pretrained", **(types | own | changes))


def made(folder, **changes):
    return assembly.build(validate(make_config(folder, **changes)))


def types(tree):
    return {x.dtype.name for x in jax.tree.leaves(tree) if x.dtype != jnp.int32}


def test_what_is_trained_is_float32_and_the_reference_as_stored(tmp_path):
    """Every number is that of the file."""
    run = made(tmp_path, **{"objective.kl_coef": 0.1})
    assert (run.settings.model.param_dtype, run.settings.model.dtype) == ("float32", "bfloat16")
    state = run.start(print)
    _, stored = load_pretrained(run.settings.pretrained)
    assert types(stored) == {"bfloat16"}
    assert types(state.trained) == types(state.opt_state) == {"float32"}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.trained.policy), jax.device_get(stored))
    for folder in (None, tmp_path / "reference", tmp_path / "reference"):  # not stored, stored, and read again
        reference = run.source.started(state, folder).reference
        assert types(reference) == {"bfloat16"}
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(reference.trained), jax.device_get(stored))


def test_a_reference_that_its_type_does_not_hold_stays_as_it_is():
    """1 + 2^-7 has 8 bits and is a bfloat16, 1 + 2^-8 is not."""
    params = {"held": jnp.array([1.0, 1 + 2.0**-7]), "lost": jnp.array([1.0, 1 + 2.0**-8])}
    kept = in_type(params, "bfloat16")
    assert {name: x.dtype.name for name, x in kept.items()} == {"held": "bfloat16", "lost": "float32"}
    assert all(kept[name].astype(jnp.float32).tolist() == x.tolist() for name, x in params.items())
    assert in_type({"x": kept["held"]}, "float32")["x"].dtype == jnp.bfloat16  # no type is widened


def test_the_base_of_adapters_stays_as_stored(tmp_path):
    run = made(tmp_path, **{"lora.rank": 2, "objective.kl_coef": 0.1})
    assert (run.settings.model.param_dtype, run.settings.model.dtype) == ("bfloat16", "bfloat16")
    state = run.start(print)
    assert types(state.base) == {"bfloat16"}
    assert types(state.trained) == types(state.opt_state) == {"float32"}


def test_a_run_may_be_told_to_train_in_bfloat16(tmp_path):
    """A value head is float32 all the same, and so are all moments; there are no masters."""
    run = made(tmp_path, **{"objective.name": "ppo", "critic.kind": "head"}, **TOLD)
    state = run.start(print)
    head = state.trained.policy["value_head"]
    assert types({**state.trained.policy, "value_head": {}}) == {"bfloat16"}
    assert types(head) == types(state.opt_state) == {"float32"}
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.dtype != jnp.int32]
    assert len(moments) == 2 * len(jax.tree.leaves(state.trained))


@pytest.mark.slow
def test_the_memory_that_is_told_is_that_of_these_types(tmp_path):
    """Bytes a parameter: 4, two moments of 4, a reference of 2. Told bfloat16 2 and moments of 4. Adapters on a base
    of 2."""
    reference = {"objective.kl_coef": 0.1}
    run = made(tmp_path, **reference)
    count = sum(x.size for x in jax.tree.leaves(run.model.shapes()))
    found = stays_of(run, [])
    assert [found[name] // count for name in ("parameters", "optimizer", "reference")] == [4, 8, 2]
    told = stays_of(made(tmp_path, **reference, **TOLD), [])
    assert [told[name] // count for name in ("parameters", "optimizer", "reference")] == [2, 8, 2]
    adapted = stays_of(made(tmp_path, **{"lora.rank": 2}), [])
    assert adapted["frozen base"] == 2 * count
    assert adapted["optimizer"] // adapted["adapters"] == 2


def read_by_all(params):
    """Without the embedding, of which a batch reads the rows of its own tokens."""
    return params | {"ends": {name: x for name, x in params["ends"].items() if name != "embedding"}}


@pytest.mark.slow
@pytest.mark.parametrize("told", [{}, TOLD], ids=["float32", "bfloat16"])
def test_a_run_says_how_much_its_updates_move(tmp_path, told):
    """Supervised, so that every step has a gradient. The run and a check say the same, and a resume too."""
    config = make_config(tmp_path, **told, **{"objective.name": "sft", "rollout.group_size": 1, "rollout.slots": 0})
    found, said = tiny_run.train(tmp_path / "run", config)
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    run = assembly.build(validate(config))
    checked = rehearsal_rows.update(run.settings, rehearse(run, lambda text: None))
    _, saved = tiny_run.final_state(tmp_path / "run", config)
    _, stored = load_pretrained(config.model.pretrained)
    after, before = (
        np.concatenate([np.ravel(x).astype(np.float32) for x in jax.tree.leaves(read_by_all(jax.device_get(params)))])
        for params in (saved.params, stored)
    )
    moved = (before != after).mean()
    if told:
        assert moved < 0.2
        assert all(0 < row["update/moved"] < 0.1 for row in rows)
        assert all(row["log/warnings"] == ["updates_rounded"] for row in rows)
        assert said.count("warning updates_rounded: update/moved is below 0.1") == 1
        assert checked.verdict == LOOK
        assert checked.remedy.startswith("set model.param_dtype=float32")
    else:
        assert moved > 0.9
        assert all(row["update/moved"] > 0.9 for row in rows)
        assert "updates_rounded" not in said
        assert checked.verdict == OK
    tiny_run.assert_resumes_as((config, tmp_path / "run", found), tmp_path / "parts")


@pytest.mark.slow
def test_a_warm_start_moves_a_base_in_bfloat16(tmp_path):
    """8 steps of 1e-4 to weights of 0.18, whose neighbours are up to 9.8e-4 apart: one step alone is rounded away."""
    warmed = {"warm_start.steps": 8, "warm_start.learning_rate": 1e-4, "warm_start.batch_size": 8}
    run = made(tmp_path, **{"lora.rank": 2} | warmed)
    state = run.start(print)
    assert types(state.base) == {"bfloat16"}
    _, stored = load_pretrained(run.settings.pretrained)
    before, after = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(p))]) for p in (stored, state.base)
    )
    assert (before != after).mean() > 0.3
