"""The warm start: it learns, it stops by pass rate, and its cache is whole and never the wrong one."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import models, tasks
from jaxrl_llm.models import save_pretrained, scoring
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.training import warm_start as module
from jaxrl_llm.training.step import Learner
from jaxrl_llm.training.warm_start import WarmStartConfig, cached_in, warm_start
from tests.reference import tiny_training as tiny

TASK = tasks.make("sort", digits=2, train_size=64, test_size=8)
MODEL = tiny.make_model()


def config(folder, **changes):
    small = dict(steps=20, evaluate_every=2, batch_size=8, learning_rate=0.01, cache_dir=str(folder / "cache"))
    return WarmStartConfig(**small | changes)


def start(folder, **options):
    """Parameters and what was said."""
    said = []
    keywords = {"model": MODEL, "task": TASK, "config": config(folder), "data_dir": str(folder / "data")} | options
    return warm_start(**keywords, log=said.append), said


def test_it_learns_the_tasks_answers_and_gives_them_back_from_the_cache(folder, monkeypatch):
    trained, said = start(folder)
    assert [line.split("  ")[0] for line in said[:-1]] == [f"warm start: step {step}/20" for step in range(2, 21, 2)]
    assert said[-1].startswith("warm start: done, loss")
    batch = next(tasks.supervised(TASK, seed=1, batch_size=8, data_dir=folder / "data"))
    tokens, segments, mask = (jnp.asarray(batch[name]) for name in ("tokens", "segment_ids", "loss_mask"))
    score = jax.jit(lambda params: scoring.score(MODEL, params, tokens, segments).logprobs)
    fresh, _ = start(folder, config=config(folder, steps=0))
    before, after = (np.asarray(score(params))[np.asarray(mask)].mean() for params in (fresh, trained))
    assert after > before + 0.5
    eos = np.asarray(mask) & (np.asarray(tokens) == TASK.tokenizer.end_ids[0])
    assert np.asarray(score(trained))[eos].mean() > np.asarray(score(fresh))[eos].mean() + 0.5

    monkeypatch.setattr(module, "_train", None)  # a second training would fail
    again, said = start(folder)
    assert said[0].startswith("warm start: from")
    for a, b in zip(jax.tree.leaves(trained), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_checkpoint_is_trained_where_it_lies(folder, tmp_path, monkeypatch):
    """Every update overwrites the parameters and moments that it is given: a program may not write into the memory of
    numpy, in which what was read from a file lies, and would make them anew."""
    save_pretrained(tiny.draw_params(MODEL), MODEL.config, tmp_path / "checkpoint")
    update, kept = Learner.update, []

    def observed(learner, state, batch, layout):
        before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.trained)]
        state, metrics = update(learner, state, batch, layout)
        kept.append([x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.trained)] == before)
        return state, metrics

    monkeypatch.setattr(Learner, "update", observed)
    start(folder, config=config(tmp_path, steps=3), pretrained=str(tmp_path / "checkpoint"))
    assert kept == [True] * 3


def test_it_stops_at_the_pass_rate(folder):
    rates = iter([0.1, 0.4, 0.7])
    _, said = start(folder, config=config(folder, target_pass_rate=0.3), evaluate=lambda params: next(rates))
    assert next(rates) == 0.7
    assert "step 4/20" in said[-2]
    assert "pass rate 0.400" in said[-2]


@pytest.fixture
def quick(monkeypatch):
    """Training without training: the cache alone is under test."""
    monkeypatch.setattr(Model, "init_sharded", lambda model, key: {"x": jnp.zeros(3)})
    monkeypatch.setattr(Model, "shapes", lambda model: {"x": jnp.zeros(3)})
    monkeypatch.setattr(module, "_train", lambda model, task, config, params, *rest: {"x": params["x"] + 1})


def test_another_start_has_another_cache(quick, tmp_path, monkeypatch):
    """One changed ingredient each, of everything that the parameters depend on; and none where they do not."""
    monkeypatch.setattr(models, "load_params", lambda path, model: {"x": jnp.zeros(3)})
    monkeypatch.setattr(models, "fingerprint", lambda path: f"digest of {path}")
    names = {
        "as it is": start(tmp_path),
        "steps": start(tmp_path, config=config(tmp_path, steps=21)),
        "learning rate": start(tmp_path, config=config(tmp_path, learning_rate=0.02)),
        "batch": start(tmp_path, config=config(tmp_path, batch_size=4)),
        "seed": start(tmp_path, config=config(tmp_path, seed=1)),
        "evaluate every": start(tmp_path, config=config(tmp_path, evaluate_every=3)),
        "target": start(tmp_path, config=config(tmp_path, target_pass_rate=0.5)),
        "measured": start(tmp_path, config=config(tmp_path, target_pass_rate=0.5), evaluated_on={"samples": 2}),
        "model": start(tmp_path, model=tiny.make_model(hidden_size=8)),
        "mesh": start(tmp_path, model=tiny.make_model((2, 1, 1, 1))),
        "pretrained": start(tmp_path, pretrained="a"),
        "other weights": start(tmp_path, pretrained="b"),
        "task": start(tmp_path, task=tasks.make("sort", digits=3, train_size=64, test_size=8)),
        "size": start(tmp_path, task=tasks.make("sort", digits=2, train_size=32, test_size=8)),
    }
    found = list((tmp_path / "cache" / "warm_start").glob("*[!k]"))  # without the locks
    assert not any(said and "from" in said[0] for name, (_, said) in names.items() if name != "as it is")
    assert len(found) >= len(names)
    for same in ({}, {"evaluated_on": {"samples": 2}}, {"data_dir": "elsewhere"}):
        assert start(tmp_path, **same)[1][0].startswith("warm start: from")


@pytest.mark.parametrize("broken", ["_train", "save_tree"])
def test_an_interrupted_start_leaves_nothing_behind(quick, tmp_path, monkeypatch, broken):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, broken, interrupt)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    params, said = start(tmp_path)
    assert not said
    np.testing.assert_array_equal(params["x"], 1)
    assert start(tmp_path)[1]


def test_a_cache_that_cannot_be_written_is_named(quick, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OSError, match=r"cannot be written .*set warm_start\.cache_dir"):
        start(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": -1}, r"warm_start\.steps=-1"),
        ({"learning_rate": -1.0}, r"warm_start\.learning_rate=-1\.0"),
        ({"batch_size": 0}, r"warm_start\.batch_size=0"),
        ({"target_pass_rate": 1.0}, r"warm_start\.target_pass_rate=1\.0"),
    ],
)
def test_bad_values_name_their_field(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        config(folder, **changes)


def test_the_cache_key_has_the_cores_that_the_process_may_use(folder, monkeypatch):
    """A run pinned to one core has other bits than one on all cores of the machine."""
    places = set()
    for cores in ({0}, {0, 3}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: cores, raising=False)
        places.add(cached_in(MODEL, TASK, config(folder)))
    assert len(places) == 2
