"""Predictive routing replay: the loss by hand and by loops, a predictor at 0 that changes nothing, one that is in force
in the rollout, in scoring and nowhere else, and one that learns where the router went.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.models.routing import Routing, is_recorded, select_experts
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.gaps import differ
from jaxrl_llm.training.layout import lay_out
from jaxrl_llm.training.optimizer import make_predictor_optimizer
from jaxrl_llm.training.predictor import prediction_gaps, prediction_kl
from jaxrl_llm.training.routing_replay import ReplayConfig
from jaxrl_llm.training.state import make_state, predicting
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny
from tests.training.test_routing_replay import LEARNER, MODEL, PADDED, assert_equal, params

PREDICTING = dataclasses.replace(LEARNER, predictor_optimizer=optax.sgd(1.0))
SEGMENTS = np.asarray(tiny.draw_batch().segment_ids)


@functools.cache
def predictor(scale=0.5):
    """Large enough that other experts are chosen for many tokens."""
    shape = (2, MODEL.config.hidden_size, MODEL.config.num_experts)
    return jnp.asarray(scale * np.random.default_rng(7).normal(size=shape), jnp.float32)


def state_of(weights, learner=PREDICTING, moved=False):
    policy = jax.tree.map(jnp.copy, params(moved))
    state = make_state(MODEL, policy, learner.optimizer, predictor_optimizer=learner.predictor_optimizer)
    return state if weights is None else state.replace(predictor=jnp.copy(weights))


def scored(mode, weights=None, learner=PREDICTING, layout=PADDED):
    scorer = Scorer(learner, ReplayConfig(mode, "experts"), tiny.GROUP)
    return scorer(state_of(weights, learner), params(), tiny.draw_trajectory(), [layout])


def update(weights, *, moved=False, first=False, learner=PREDICTING, layout=PADDED, batch=None):
    """(state before, state after, metrics) of one update on a rollout that was scored with this predictor."""
    batch = scored("PR2", weights).batch if batch is None else batch
    state = state_of(weights, learner, moved)
    before = jax.device_get(state)
    after, metrics = jax.device_get(learner.update(state, batch, layout, first=first))
    return before, after, metrics


def test_the_divergence_and_its_gradient_by_hand():
    """Two experts, h = 1, p_old = 0, p = 0, W_p = (ln 3, 0): the prediction is (3/4, 1/4) and the router's (1/2, 1/2).

    KL = ln(2/3) / 2 + ln(2) / 2 = ln(4/3) / 2, and its gradient in W_p is h (3/4 - 1/2, 1/4 - 1/2).
    """
    old = Routing(jnp.zeros((1, 1, 1, 1), jnp.uint8), jnp.zeros((1, 1, 1, 2)), jnp.ones((1, 1, 1, 1)))
    weights = jnp.log(jnp.array([[[3.0, 1.0]]]))

    def total(weights, logits):
        return prediction_kl(weights, old, logits).sum()

    value, (slope, none) = jax.value_and_grad(total, (0, 1))(weights, jnp.zeros((1, 1, 1, 2)))
    np.testing.assert_allclose(value, np.log(4 / 3) / 2, rtol=1e-6)
    np.testing.assert_allclose(slope[0, 0], [1 / 4, -1 / 4], rtol=1e-6)
    assert not none.any()  # the current router is the target


def test_the_divergence_of_every_router_is_that_of_loops():
    rng = np.random.default_rng(3)
    h, p_old, p = (jnp.asarray(rng.normal(size=(2, 3, 4, n)), jnp.float32) for n in (5, 6, 6))
    weights = jnp.asarray(rng.normal(size=(2, 5, 6)), jnp.float32)
    found = prediction_kl(weights, Routing(jnp.zeros((2, 3, 4, 2), jnp.uint8), p_old, h), p)
    expected = np.zeros((2, 3, 4))
    for place in np.ndindex(2, 3, 4):
        predicted = np.exp(np.float64(p_old[place]) + np.float64(h[place]) @ np.float64(weights[place[0]]))
        router = np.exp(np.float64(p[place]))
        predicted, router = predicted / predicted.sum(), router / router.sum()
        expected[place] = sum(a * np.log(a / b) for a, b in zip(router, predicted, strict=True))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6)


def test_gaps_without_a_predictor_by_hand():
    """One router, top-1: at the first of two tokens it went from (0, 0+) to (ln 3, 0), at the second it stayed."""
    old = Routing(jnp.array([[[[1], [1], [255]]]], jnp.uint8), jnp.array([[[[0, 1e-6], [0, 1], [0, 0]]]], jnp.float32))
    current = jnp.array([[[[np.log(3), 0], [0, 1], [9, 0]]]], jnp.float32)
    found = M.finalize(jax.device_get(prediction_gaps(old, current, jnp.array([[1, 1, 0]]))))
    kl = 3 / 4 * np.log(3 / 2) + 1 / 4 * np.log(1 / 2)
    assert found["routing/unpredicted_kl"] == pytest.approx(kl / 2, rel=1e-4)
    assert found["routing/flips_unpredicted"] == 0.5


def test_a_change_moves_the_choice_and_not_the_gates():
    logits, change = jnp.array([[3.0, 2.0, 1.0, 0.0]]), jnp.array([[0.0, -9.0, 0.0, 5.0]])
    experts, gates = select_experts(logits, 2, True, change=change)
    np.testing.assert_array_equal(experts, [[3, 0]])
    np.testing.assert_allclose(gates, [[1 / (1 + np.e**3), 1 / (1 + np.e**-3)]], rtol=1e-6)


def test_a_predictor_at_zero_is_r2_to_the_bit():
    """Scores, records, gradient and every metric that R2 has, whether parameters have moved or not."""
    r2, pr2 = scored("R2", learner=LEARNER), scored("PR2")
    assert_equal(pr2.batch.old_logprobs, r2.batch.old_logprobs)
    assert_equal(pr2.batch.routing.replayed, r2.batch.routing.replayed)
    assert M.finalize(jax.device_get(pr2.metrics)) == M.finalize(jax.device_get(r2.metrics))
    for moved in (False, True):
        plain, numbers = LEARNER.update(state_of(None, LEARNER, moved), r2.batch, PADDED)
        _, ours, found = update(None, moved=moved, batch=pr2.batch)
        assert_equal(ours.params, jax.device_get(plain.params))
        numbers, found = (M.finalize(jax.device_get(x)) for x in (numbers, found))
        assert {name: found[name] for name in numbers} == numbers
        same = found["loss/predictor"] == pytest.approx(found["routing/unpredicted_kl"])
        assert same
        assert bool(found["loss/predictor"] > 1e-2) is moved


def test_scoring_records_and_uses_the_predicted_experts():
    """The top k of p_old + h_old W_p from what was recorded; the ratio of the first update is 1."""
    found = scored("PR2", predictor())
    old = found.batch.routing.scored
    change = np.einsum("lbtd,lde->lbte", np.float64(old.inputs), np.float64(predictor()))
    expected = np.argsort(-(np.float64(old.logits) + change), axis=-1)[..., :2]
    here = np.broadcast_to(SEGMENTS > 0, expected.shape[:3])
    np.testing.assert_array_equal(np.sort(np.asarray(old.experts)[here]), np.sort(expected[here]))
    plain = scored("R2", learner=LEARNER).batch
    share, both = differ(old, plain.routing.scored)
    assert 0.05 < float(share[both].mean()) < 0.8
    assert np.abs(np.asarray(found.batch.old_logprobs - plain.old_logprobs)).max() > 1e-2
    metrics = M.finalize(update(predictor(), batch=found.batch)[2])
    assert metrics["check/current_old_mean"] == 0
    assert metrics["routing/flips_unpredicted"] == 0  # of the router itself, which has not moved
    assert metrics["routing/flips_old_current"] > 0.05


def test_the_reference_knows_no_predictor():
    assert_equal(scored("PR2", predictor()).batch.ref_logprobs, scored("R2", learner=LEARNER).batch.ref_logprobs)


def test_the_rollout_chooses_the_predicted_experts():
    """Up to near-ties, sampler and trainer choose the same, and others than without the predictor."""
    engine = Engine(MODEL, Sampling(), tiny.GROUP, tiny.ANSWER, end_ids=(1,))
    prompts = np.random.default_rng(0).integers(2, 16, (2, tiny.PROMPT)).astype(np.int32)
    asked = prompts, np.array([3, 4], np.int32), np.arange(2, dtype=np.uint32), jax.random.key(0)
    out = engine.generate(predicting(params(), predictor()), *asked).replace(rewards=jnp.arange(8.0))
    layout = lay_out(np.arange(tiny.ROWS), np.asarray(out.segment_ids).sum(1), tiny.TIME, tiny.UPDATES)
    for weights, agree in ((predictor(), True), (None, False)):
        scorer = Scorer(PREDICTING, ReplayConfig("PR2", "experts"), tiny.GROUP)
        found = scorer(state_of(weights), params(), out, [layout])
        share, both = differ(out.routing, found.batch.routing.scored)
        assert (int((share[both] > 0).sum()) <= 2) is agree
        assert bool(M.finalize(found.metrics)["routing/flips_sampler_old"] < 0.01) is agree
        gap = np.abs(np.asarray(jnp.where(out.loss_mask, found.batch.old_logprobs, 0) - out.sampler_logprobs)).max()
        assert bool(gap < 1e-3) is agree


def test_the_first_minibatch_teaches_nothing():
    """There the router is where it was; a step would pull the predictor to 0."""
    adam = dataclasses.replace(PREDICTING, predictor_optimizer=make_predictor_optimizer(tiny.OPTIMIZER, 0.01))
    before, after, _ = update(predictor(), moved=True, first=True, learner=adam)
    assert_equal((after.predictor, after.predictor_opt_state), (before.predictor, before.predictor_opt_state))
    _, then, _ = update(predictor(), moved=True, learner=adam)
    assert_equal(then.params, after.params)  # the policy does not feel it
    assert np.abs(then.predictor - before.predictor).max() > 1e-3
    assert int(then.predictor_opt_state[0].count) == 1


def test_the_gradient_is_that_of_loops_however_the_minibatch_is_cut():
    """dL/dW_p = h^T (predicted - router), summed over layers, mean over the tokens that are no padding."""
    batch = scored("PR2", predictor()).batch
    old, moved = batch.routing.scored, params(True)
    again = jax.jit(functools.partial(MODEL.apply, router_logits=True))(
        moved, batch.tokens, segment_ids=batch.segment_ids, routing=Routing(old.experts)
    ).routing
    expected, kl, here = np.zeros(predictor().shape), 0.0, SEGMENTS > 0
    for layer in range(2):
        h, p_old, p = (np.float64(x[layer])[here] for x in (old.inputs, old.logits, again.logits))
        predicted = np.exp(p_old + h @ np.float64(predictor()[layer]))
        predicted /= predicted.sum(-1, keepdims=True)
        router = np.exp(p) / np.exp(p).sum(-1, keepdims=True)
        expected[layer] = h.T @ (predicted - router) / here.sum()
        kl += (router * np.log(router / predicted)).sum() / here.sum()
    for micro in (0, 2):
        layout = tiny.in_one_shape(tiny.layout_of(micro=micro))
        before, after, metrics = update(predictor(), moved=True, layout=layout, batch=batch)
        np.testing.assert_allclose(before.predictor - after.predictor, expected, atol=2e-6)
        assert M.finalize(metrics)["loss/predictor"] == pytest.approx(kl, rel=1e-4)


def test_it_learns_where_the_router_went():
    """From 0, with the policy held: the divergence falls, and fewer of the experts differ than without it."""
    still = dataclasses.replace(
        PREDICTING, optimizer=optax.sgd(0.0), predictor_optimizer=make_predictor_optimizer(tiny.OPTIMIZER, 0.05)
    )
    batch, state = scored("PR2").batch, state_of(None, still, moved=True)
    for _ in range(60):
        state, metrics = still.update(state, batch, PADDED)
    found = M.finalize(jax.device_get(metrics))
    assert found["loss/predictor"] < 0.6 * found["routing/unpredicted_kl"]
    old = batch.routing.scored
    predicted = np.einsum("lbtd,lde->lbte", np.asarray(old.inputs), np.asarray(state.predictor)) + old.logits
    chosen = Routing(jax.lax.top_k(predicted, 2)[1].astype(jnp.uint8))
    current = scored_router(batch)
    known = np.asarray(is_recorded(old.experts))
    assert differ(chosen, current)[0][known].mean() < 0.8 * found["routing/flips_unpredicted"]


def scored_router(batch):
    """The experts that the moved router would choose under the replay."""
    replay = Routing(batch.routing.scored.experts)
    logits = jax.jit(functools.partial(MODEL.apply, router_logits=True))(
        params(True), batch.tokens, segment_ids=batch.segment_ids, routing=replay
    ).routing.logits
    return Routing(jax.lax.top_k(logits, 2)[1].astype(jnp.uint8))


def test_a_masked_minibatch_leaves_the_predictor_as_it_is():
    batch = scored("PR2", predictor()).batch
    empty = batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask))
    before, after, metrics = update(predictor(), moved=True, batch=empty)
    assert_equal(after, before)
    assert M.finalize(metrics)["update/skipped"] == 1


def test_logits_are_not_replayed_of_predicted_experts():
    with pytest.raises(ValueError, match=r"replay\.what='logits' freezes.*set replay\.what=experts"):
        ReplayConfig("PR2", "logits")
    with pytest.raises(ValueError, match=r"replay\.predictor_learning_rate=-1"):
        ReplayConfig("PR2", "experts", -1.0)


def test_one_learner_serves_without_a_predictor():
    """Nothing of a run without one changes: no leaf in the state, no metric."""
    state = make_state(MODEL, jax.tree.map(jnp.copy, params()), LEARNER.optimizer)
    assert state.predictor is None
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves((state.params, state.opt_state))) + 1
    _, metrics = LEARNER.update(state, scored("R2", learner=LEARNER).batch, PADDED)
    assert not [name for name in metrics if "predict" in name]


def test_the_learners_are_values():
    assert make_predictor_optimizer(tiny.OPTIMIZER, 1e-3) is make_predictor_optimizer(tiny.OPTIMIZER, 1e-3)
    assert isinstance(PREDICTING, Learner)
