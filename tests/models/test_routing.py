"""Choosing experts and replaying them: one code path, exact gates, a gradient for the router."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.models.gate import Gate
from jaxrl_llm.models.routing import EXACT, Router, Routing, is_recorded, no_record, routing_dtype
from tests.reference import transformer_numpy

MOE = dict(num_experts=4, num_experts_per_tok=2)
_choose = jax.jit(Gate.choose, static_argnums=0)


def test_golden_choice():
    """Scores 0, ln 2, ln 5, ln 1: the softmax over all is (1, 2, 5, 1) / 9, over the chosen two (5, 2) / 7."""
    logits = jnp.log(jnp.array([[1.0, 2.0, 5.0, 1.0]]))
    routing, gates = Gate(4, 2).choose(logits, {})
    np.testing.assert_array_equal(routing.experts, [[2, 1]])
    np.testing.assert_allclose(gates, [[5 / 7, 2 / 7]], rtol=1e-6)
    np.testing.assert_allclose(Gate(4, 2, normalise=False).choose(logits, {})[1], [[5 / 9, 2 / 9]], rtol=1e-6)
    recorded = jnp.array([[1, 255]], jnp.uint8)
    np.testing.assert_allclose(Gate(4, 2).logprob(logits, recorded), [[np.log(2 / 9), 0]], rtol=1e-6)


def test_sigmoid_bias_and_scale():
    """Scores 1/5, 2/3, 1/2, 3/4. The bias lifts the third over the fourth; the gates know nothing of it."""
    logits, bias = jnp.log(jnp.array([[1 / 4, 2.0, 1.0, 3.0]])), {"router_bias": jnp.array([0.0, 0.0, 0.3, 0.0])}
    gate = Gate(4, 2, scoring="sigmoid", selection_bias=True, scale=2.0)
    routing, gates = gate.choose(logits, bias)
    np.testing.assert_array_equal(routing.experts, [[2, 3]])
    np.testing.assert_allclose(gates, [[2 * 2 / 5, 2 * 3 / 5]], rtol=1e-6)
    plain = dataclasses.replace(gate, normalise=False, scale=1.0)
    np.testing.assert_allclose(plain.choose(logits, bias)[1], [[1 / 2, 3 / 4]], rtol=1e-6)
    replayed, gates = gate.choose(logits, bias, Routing(jnp.array([[0, 1]], jnp.uint8)))
    np.testing.assert_array_equal(replayed.experts, [[0, 1]])
    np.testing.assert_array_equal(replayed.chosen, [[2, 3]])
    np.testing.assert_allclose(gates, [[2 * 3 / 13, 2 * 10 / 13]], rtol=1e-6)
    total = 1 / 5 + 2 / 3 + 1 / 2 + 3 / 4
    np.testing.assert_allclose(gate.logprob(logits, jnp.array([[1]], jnp.uint8)), [[np.log(2 / 3 / total)]], rtol=1e-6)


def test_groups_keep_the_best_by_their_two_largest():
    """Three groups of two. Expert 4 has the largest score, but its group the smallest sum; a score below 0 in a kept
    group goes before every score of another, since what is left out is -inf."""
    logits = jnp.log(jnp.array([[2.0, 2.0, 1.5, 0.1, 3.0, 0.01]]))
    gate = Gate(6, 2, scoring="sigmoid", selection_bias=True, groups=3, kept_groups=1)
    np.testing.assert_array_equal(gate.choose(logits, {"router_bias": jnp.zeros(6)})[0].experts, [[0, 1]])
    below = {"router_bias": jnp.array([1.0, -0.8, 0.0, 0.0, -0.5, 0.0])}
    np.testing.assert_array_equal(gate.choose(logits, below)[0].experts, [[0, 1]])


@given(seed=st.integers(0, 2**31 - 1), normalise=st.booleans())
def test_replay_by_hand(seed, normalise):
    """Recorded tokens keep their experts (and logits), the others route freshly; gates follow the logits in force."""
    rng = np.random.default_rng(seed)
    fresh, old = rng.standard_normal((2, 5, 6)).astype(np.float32)
    recorded = rng.random(5) < 0.5
    given_experts = np.array([rng.permutation(6)[:3] for _ in range(5)], np.uint8)
    given_experts[~recorded] = 255
    for logits in (None, old):
        replay = Routing(experts=jnp.asarray(given_experts), logits=None if logits is None else jnp.asarray(logits))
        routing, gates = _choose(Gate(6, 3, normalise), fresh, {}, replay)
        np.testing.assert_array_equal(routing.chosen, np.argsort(-fresh, axis=-1)[:, :3])
        for n in range(5):
            probs = transformer_numpy.softmax(
                (old if recorded[n] and logits is not None else fresh)[n].astype(np.float64)
            )
            expected = given_experts[n] if recorded[n] else np.argsort(-probs)[:3]
            np.testing.assert_array_equal(routing.experts[n], expected)
            share = probs[expected] / (probs[expected].sum() if normalise else 1)
            np.testing.assert_allclose(gates[n], share, rtol=1e-5)


def test_gates_survive_an_expert_without_probability():
    """Recorded experts whose probabilities underflow to 0: renormalised probabilities would be 0 / 0."""
    logits = jnp.array([[200.0, 0.0, 0.0, -1.0]])
    replay = Routing(experts=jnp.array([[1, 3]], jnp.uint8))
    gates, grad = jax.value_and_grad(lambda s: Gate(4, 2).choose(s, {}, replay)[1][0, 0])(logits)
    assert gates == pytest.approx(1 / (1 + np.exp(-1)))
    np.testing.assert_allclose(grad, [[0, gates * (1 - gates), 0, -gates * (1 - gates)]], rtol=1e-6)


@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [(2, "uint8"), (255, "uint8"), (256, "uint16"), (65535, "uint16"), (65536, "int32")],
)
def test_the_narrowest_type_keeps_its_maximum_free(num_experts, dtype):
    assert routing_dtype(num_experts) == jnp.dtype(dtype)
    largest = jnp.array([[num_experts - 1]], routing_dtype(num_experts))
    assert is_recorded(largest)
    assert not is_recorded(jnp.full_like(largest, no_record(largest)))


def test_padding_has_no_record(tiny, params_of, forward, batch):
    model = tiny(**MOE)
    experts = forward(model, params_of(model), *batch)[1].experts
    assert experts.dtype == jnp.uint8
    np.testing.assert_array_equal(is_recorded(experts)[0], np.asarray(batch[1]) != 0)
    assert np.all(np.asarray(experts)[:, np.asarray(batch[1]) == 0] == 255)


def test_256_experts_need_a_wider_record(tiny, batch):
    model = tiny(num_experts=256)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    routing = jax.eval_shape(lambda p: vars(model.apply(p, batch[0]).routing), shapes)
    assert routing["experts"].dtype == jnp.uint16
    assert routing["logits"] is None  # not asked for


def test_replaying_its_own_record_changes_nothing(tiny, params_of, forward, batch):
    model = tiny(**MOE)
    params = params_of(model)
    logits, routing = forward(model, params, *batch)
    valid = np.asarray(batch[1]) != 0
    for replay in (Routing(experts=routing.experts), routing):
        again, returned = forward(model, params, *batch, replay)
        np.testing.assert_allclose(again[valid], logits[valid], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(returned.experts, routing.experts)


def test_replaying_another_record_equals_the_reference(tiny, params_of, forward, batch):
    model = tiny(**MOE)
    params = params_of(model)
    valid = np.asarray(batch[1]) != 0
    other = np.random.default_rng(5).permuted(np.broadcast_to(np.arange(4), (2, 2, 8, 4)), axis=-1)[..., :2]
    other = np.where(valid[None, :, :, None], other, 255).astype(np.uint8)
    logits, routing = forward(model, params, *batch, Routing(experts=jnp.asarray(other)))
    expected, _, router = transformer_numpy.transformer(params, model.config, *batch, given=other)
    np.testing.assert_allclose(logits[valid], expected[valid], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(routing.experts, other)
    np.testing.assert_allclose(
        routing.logits[:, valid], router[:, valid], rtol=1e-5, atol=1e-5
    )  # fresh ones all the same
    assert np.max(np.abs(np.asarray(forward(model, params, *batch)[0] - logits)[valid])) > 0.01  # it was another one


def test_the_router_learns_under_replayed_experts_not_under_replayed_logits(tiny, params_of, batch):
    model = tiny(**MOE)
    params = params_of(model)

    @jax.jit
    def router_gradient(params, routing):
        loss = lambda p: jnp.sum(jnp.square(model.apply(p, batch[0], routing=routing).hidden[:, :, :3]))  # noqa: E731
        return jax.grad(loss)(params)["moe"]["mlp"]["router"]

    experts = jnp.broadcast_to(jnp.array([3, 0], jnp.uint8), (2, 2, 8, 2))
    frozen = Routing(experts=experts, logits=jnp.ones((2, 2, 8, 4)))
    by_layer = np.abs(router_gradient(params, Routing(experts=experts))).max(axis=1)
    assert np.all(by_layer[:, [0, 3]] > 0)
    assert np.all(by_layer[:, [1, 2]] == 0)  # experts outside the record are outside the gates
    assert not np.any(router_gradient(params, frozen))


def _operands(seed=0, rows=2000):
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((rows, 8)), rng.standard_normal((8, 6)) / 3
    return jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32)


def test_the_exact_router_is_the_product():
    x, weight = _operands(rows=5)
    np.testing.assert_allclose(EXACT.logits(x, weight), np.asarray(x, np.float64) @ np.asarray(weight), atol=1e-6)


def test_noise_is_standard_normal():
    """12000 draws: mean, variance, fourth moment and correlations between experts within five standard errors."""
    x, weight = _operands()
    exact = EXACT.logits(x, weight)
    z = np.asarray(Router(noise=0.5).logits(x, weight) - exact, np.float64) / 0.5
    n = z.size
    assert abs(z.mean()) < 5 / np.sqrt(n)
    assert abs(z.var() - 1) < 5 * np.sqrt(2 / n)
    assert abs((z**4).mean() - 3) < 5 * np.sqrt(96 / n)
    assert np.abs(np.corrcoef(z.T) - np.eye(6)).max() < 5 / np.sqrt(len(z))


def test_noise_does_not_know_the_place_of_a_token():
    """On operands whose products and sums are exact, so that no order of sums changes a bit."""
    x, weight = (jnp.round(8 * one) / 8 for one in _operands(rows=50))
    order = np.random.default_rng(1).permutation(len(x))
    moved = Router(noise=0.5).logits(x[order], weight)
    np.testing.assert_array_equal(moved, Router(noise=0.5).logits(x, weight)[order])


def test_a_bias_is_of_the_expert_alone():
    """The same for all tokens, in proportion to its size, and beside the noise; drawn as a normal number is."""
    x, weight = _operands(rows=50)
    added = Router(bias=0.5).logits(x, weight) - EXACT.logits(x, weight)
    np.testing.assert_allclose(added, np.broadcast_to(added[0], added.shape), atol=1e-6)
    assert 0.1 < np.std(added[0]) < 1
    twice = Router(bias=1.0, noise=0.5).logits(x, weight) - Router(noise=0.5).logits(x, weight)
    np.testing.assert_allclose(twice, 2 * added, atol=1e-6)


def test_noise_and_bias_of_the_choice_alone_leave_the_gates():
    """The experts are those of a router that is moved as a whole, the gates those of the exact logits at them."""
    x, weight = _operands(rows=50)
    exact, moved = EXACT.logits(x, weight), Router(noise=1.0, bias=1.0).logits(x, weight)
    routing, gates = Gate(6, 2, router=Router(noise=1.0, bias=1.0, gates="exact"))(x, {"router": weight})
    np.testing.assert_array_equal(routing.logits, exact)
    np.testing.assert_array_equal(routing.experts, np.argsort(-moved, axis=-1)[:, :2])
    assert np.any(routing.experts != np.argsort(-exact, axis=-1)[:, :2])
    np.testing.assert_allclose(gates, jax.nn.softmax(jnp.take_along_axis(exact, routing.experts, -1)), rtol=1e-6)


def test_a_bfloat16_router_rounds_operands_and_logits():
    """By hand: 1 + 2^-9 is 1 in bfloat16 (8 bits), so the products with 1 and 3 are 1 and 3; 257 becomes 256."""
    x, weight = jnp.array([[1 + 2.0**-9]]), jnp.array([[1.0, 3.0, 257.0]])
    np.testing.assert_array_equal(Router("bfloat16").logits(x, weight), [[1, 3, 256]])


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "float16"), ("noise", -0.1), ("bias", -0.1), ("gates", "exact")]
)
def test_a_router_that_cannot_be_is_named(field, value):
    with pytest.raises(ValueError, match=f"rollout.router_{field}="):
        Router(**{field: value})
