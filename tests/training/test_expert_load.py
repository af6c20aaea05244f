"""The load of the experts, and the bias of a gate that supervised training moves towards an even one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground import sharding
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.training.expert_load import evened, load, tokens_sent
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny

RATE = 0.03
BIASED = dataclasses.replace(tiny.CONFIG, scoring_func="sigmoid", selection_bias=True)


def test_the_load_of_experts_counts_recorded_tokens():
    """Two tokens of two experts, and padding: in the first layer expert 0 has half of the load, twice its share of a
    quarter, and expert 3 none; in the second all four have one each. Without the first token three have one."""
    experts = jnp.array([[[[0, 1], [2, 0], [255, 255]]], [[[0, 1], [2, 3], [255, 255]]]], jnp.uint8)
    found = M.finalize(load(tokens_sent(experts, 4)))
    assert found["routing/load_max_by_layer"] == [2, 1]
    assert found["routing/experts_used_by_layer"] == [0.75, 1]
    later = tokens_sent(experts, 4, jnp.array([[False, True, True]]))
    np.testing.assert_array_equal(later, [[1, 0, 1, 0], [0, 0, 1, 1]])


def test_a_bias_moves_by_the_sign_of_what_is_missing():
    """arXiv 2408.15664, algorithm 1: up below the mean of 3 tokens, down above it, unmoved at it."""
    policy = {"moe": {"mlp": {"router_bias": jnp.array([[0.5, 0.0, -0.5, 1.0]]), "router": 0}}, "ends": 1}
    new = evened(policy, jnp.array([[6.0, 3.0, 0.0, 3.0]]), 0.25)
    np.testing.assert_array_equal(new["moe"]["mlp"]["router_bias"], [[0.25, 0.0, -0.25, 1.0]])
    assert new["ends"] == 1
    assert new["moe"]["mlp"]["router"] == 0


def updated(rate, mesh=None, micro=0, steps=1):
    """(the state after supervised steps on one batch, the metrics of each)."""
    model = Model(BIASED, mesh)
    learner = Learner(model, objectives.make("sft"), optax.sgd(0.1), rows="padded", router_bias_rate=rate)
    state = make_state(model, tiny.draw_params(model), learner.optimizer)
    given = tiny.draw_batch().replace(**dict.fromkeys(("old_logprobs", "sampler_logprobs", "old_values", "returns")))
    given = sharding.constrain_rollout(given, mesh) if mesh is not None else given
    layout, told = tiny.layout_of(micro=micro), []
    for _ in range(steps):
        state, metrics = learner.update(state, given, layout)
        told.append(M.finalize(jax.device_get(metrics)))
    return state.trained.policy, told


def test_a_supervised_step_moves_the_bias_alone():
    """By the load of all tokens that are no padding, prompts among them; what the gradient moves is as without it."""
    model, batch = Model(BIASED), tiny.draw_batch()
    start = tiny.draw_params(model)
    chosen = model.apply(start, batch.tokens, segment_ids=batch.segment_ids, rows="padded").routing.experts
    real = np.asarray(batch.segment_ids) != 0
    sent = np.stack([np.bincount(np.asarray(of)[real].ravel(), minlength=4) for of in chosen])
    expected = start["moe"]["mlp"]["router_bias"] + RATE * np.sign(sent.mean(1, keepdims=True) - sent)
    (frozen, _), (moved, (told,)) = updated(0.0), updated(RATE)
    np.testing.assert_allclose(moved["moe"]["mlp"].pop("router_bias"), expected, rtol=1e-6)
    np.testing.assert_array_equal(frozen["moe"]["mlp"].pop("router_bias"), start["moe"]["mlp"]["router_bias"])
    jax.tree.map(np.testing.assert_array_equal, moved, frozen)
    np.testing.assert_allclose(told["routing/load_max_by_layer"], 4 * sent.max(1) / sent.sum(1), rtol=1e-6)


@pytest.mark.parametrize(("shape", "micro"), [(None, 2), ((1, 2, 2, 1), 0)], ids=["micro-batches", "mesh"])
def test_the_load_is_that_of_the_whole_minibatch(shape, micro):
    mesh = None if shape is None else sharding.make_mesh(shape)
    (whole, _), (cut, _) = updated(RATE), updated(RATE, mesh, micro)
    np.testing.assert_array_equal(cut["moe"]["mlp"]["router_bias"], whole["moe"]["mlp"]["router_bias"])


@pytest.mark.slow
def test_the_load_becomes_even():
    """The busiest of four experts, of which a token uses two, has 1 where the load is even and 2 where it is in every
    token; without a move of the biases it stays there."""

    def last(rate):
        told = updated(rate, steps=150)[1]
        return np.mean([row["routing/load_max_by_layer"] for row in told[-20:]], axis=0)

    assert np.all(last(1e-9) > 1.7)
    assert np.all(last(RATE) < 1.3)
