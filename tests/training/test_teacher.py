"""A teacher beside the policy: its log-probs, and the divergence from it by plain softmaxes, however rows are cut."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground import sharding
from jaxrl_llm.run.teacher import Teacher, mesh_of_teacher
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from jaxrl_llm.training.teacher_divergence import TeacherDivergence
from tests.reference import tiny_training as tiny

OTHER = {"num_hidden_layers": 1, "hidden_size": 32, "num_experts": 0, "tie_word_embeddings": True}
SHORT = tiny.in_one_shape(tiny.layout_of())
CUTS = {"one": SHORT, "packed, in two": tiny.in_one_shape(tiny.layout_of(layout="packed", micro=4))}


def teacher_on(mesh=None):
    model = tiny.make_model(mesh, **OTHER)
    return Teacher("runs/teacher", "", model, tiny.draw_params(model, seed=5))


@functools.cache
def learner(mesh=None, beta=0.3, top_k=0, most=0):
    """SGD at rate 1 on the divergence alone: the change of the parameters is minus the gradient."""
    divergence = TeacherDivergence(teacher_on(mesh).model, beta, top_k)
    objective = objectives.make("dapo", advantage="none", teacher_coef=1.0)
    how = {"temperature": 0.9, "rows": "packed", "answer_tokens": most, "divergence": divergence}
    return Learner(tiny.make_model(mesh), objective, optax.sgd(1.0), **how)


def step(learner, layout, mesh=None):
    """(gradient, loss/teacher) of one update."""
    state = make_state(learner.model, tiny.draw_params(learner.model), learner.optimizer)
    before = jax.device_get(state.trained.policy)
    batch = tiny.draw_batch(advantages=np.zeros((tiny.ROWS, tiny.TIME), np.float32), old_values=None, returns=None)
    after, metrics = jax.device_get(learner.update(state, batch, layout, teacher_on(mesh).params))
    return jax.tree.map(np.subtract, before, after.trained.policy), M.finalize(metrics)["loss/teacher"]


@functools.cache
def whole():
    return step(learner(), SHORT)


def softmaxes(model, params):
    """log softmax(logits / 0.9) of the token at t, from the states before it, [b t v] in float64."""
    batch = tiny.draw_batch()
    hidden = jax.jit(model.apply)(params, batch.tokens, segment_ids=batch.segment_ids).hidden
    logits = np.asarray(jax.jit(model.logits)(params, hidden), np.float64) / 0.9
    return np.roll(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), 1, axis=1)


def test_the_term_is_the_mean_over_tokens_of_the_plain_divergence():
    model, taught = tiny.make_model(), teacher_on()
    p, t = softmaxes(model, tiny.draw_params(model)), softmaxes(taught.model, taught.params)
    mixture = np.log(0.7 * np.exp(p) + 0.3 * np.exp(t))
    by_token = 0.3 * (np.exp(t) * (t - mixture)).sum(-1) + 0.7 * (np.exp(p) * (p - mixture)).sum(-1)
    np.testing.assert_allclose(whole()[1], by_token[np.asarray(tiny.draw_batch().loss_mask)].mean(), rtol=1e-5)


def assert_same(found, expected):
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (found[0], expected[0])), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5 * np.abs(b).max() + 1e-9)


def test_no_cut_changes_an_update():
    assert_same(step(learner(), CUTS["packed, in two"]), whole())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2, 1, 1), (1, 1, 2, 2)], ids=str)
def test_four_devices_give_the_same_update(mesh):
    assert_same(step(learner(mesh), SHORT, mesh), whole())


@pytest.mark.slow
def test_the_whole_vocabulary_is_its_top(monkeypatch):
    """The largest k short of the vocabulary of 16 merges one entry with itself; answers alone give the same."""
    assert_same(step(learner(top_k=15), SHORT), whole())
    monkeypatch.setattr("jaxrl_llm.models.scoring._ALL", 0)
    assert_same(step(dataclasses.replace(learner(most=tiny.ANSWER), temperature=0.9), SHORT), whole())


def test_its_log_probs_are_those_of_the_plain_softmax():
    taught, rollout = teacher_on(), tiny.draw_batch()
    own = dataclasses.replace(learner(), divergence=None)
    found = np.asarray(taught.scored(own, rollout, [SHORT]).teacher_logprobs)
    plain = np.take_along_axis(softmaxes(taught.model, taught.params), np.asarray(rollout.tokens)[..., None], -1)[
        ..., 0
    ]
    mask = np.asarray(rollout.loss_mask)
    np.testing.assert_allclose(found[mask], plain[mask], atol=1e-5)
    assert jnp.ptp(found[mask]) > 0.5


MESHES = {  # of the policy, of the teacher
    "free devices": ((1, 1, 1, 1), (1, 1, 1, 1)),
    "other free devices, another shape": ((1, 2, 1, 1), (1, 1, 1, 2)),
    "the same devices": ((2, 2, 1, 1), (1, 1, 1, 4)),
    "rows that its devices do not divide": ((1, 1, 1, 1), (3, 1, 1, 1)),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * ("other" not in x)) for x in MESHES])
def test_log_probs_from_a_mesh_of_its_own_are_those_of_one_mesh(name):
    policys, teachers = MESHES[name]
    own = dataclasses.replace(learner(policys), divergence=None)
    here: Any = own.model.mesh
    mesh = mesh_of_teacher(teachers, here)
    model = dataclasses.replace(teacher_on().model, mesh=mesh)
    params = tiny.draw_params(model, seed=5)
    batch = jax.tree.map(lambda x: jax.device_put(x, sharding.rollout_sharding(x, here)), tiny.draw_batch())
    taught = Teacher("runs/teacher", "", model, params)
    found: Any = taught.scored(own, batch, [SHORT]).teacher_logprobs
    plain = teacher_on().scored(dataclasses.replace(learner(), divergence=None), tiny.draw_batch(), [SHORT])
    mask = np.asarray(batch.loss_mask)
    np.testing.assert_allclose(np.asarray(found)[mask], np.asarray(plain.teacher_logprobs)[mask], atol=1e-5)
    assert found.sharding.device_set == set(here.devices.flat)
    shared = {one for leaf in jax.tree.leaves(params) for one in leaf.devices()} & set(here.devices.flat)
    assert bool(shared) == taught.beside(here) == (name == "the same devices")


def test_a_mesh_that_no_devices_fit_is_one_line():
    some, every = sharding.make_mesh((1, 1, 1, 1)), sharding.make_mesh((4, 1, 1, 1))
    with pytest.raises(ValueError, match=r"needs 4 devices, 3 are visible; lower teacher.mesh_shape"):
        mesh_of_teacher((4, 1, 1, 1), some)
    with pytest.raises(ValueError, match=r"teacher.mesh_shape=\(1, 1, 1, 2\) takes 2 of the 4 devices of mesh.shape"):
        mesh_of_teacher((1, 1, 1, 2), every)
