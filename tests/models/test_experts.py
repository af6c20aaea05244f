"""The three expert implementations against a numpy loop and against each other, in value and gradient."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground import sharding
from jaxrl_llm.models.experts.expert_blocks import group_by_expert
from jaxrl_llm.models.experts.grouped_experts import grouped_experts
from jaxrl_llm.models.experts.implementations import apply_experts, choose_implementation
from tests.reference import transformer_numpy
from tests.reference.slowly import first_quick

D, F, E = 6, 10, 5
LOADS = ("uniform", "skewed", "empty", "single")


def _routing(load: str, n: int, k: int, num_experts: int = E) -> np.ndarray:
    """Distinct experts per token; empty leaves some experts without a row, single sends every token to the same k."""
    rng = np.random.default_rng(n + k)
    logits = rng.standard_normal((n, num_experts))
    bias = {"uniform": 0.0, "skewed": 4.0, "empty": 1e3, "single": 1e6}[load]
    logits += bias * (np.arange(num_experts) == 2)
    if load == "empty":
        logits[:, k + 1 :] -= 1e9
    if load == "single":
        logits += 1e3 * np.arange(num_experts)
    return np.argsort(-logits, axis=-1)[:, :k].astype(np.int32)


def _problem(load: str, n: int, k: int, dtype=np.float32, num_experts: int = E):
    rng = np.random.default_rng(7)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), dtype)  # noqa: E731
    gates = rng.random((n, k)).astype(np.float32)
    weights = (draw(num_experts, D, F), draw(num_experts, D, F), draw(num_experts, F, D))
    routing = jnp.asarray(_routing(load, n, k, num_experts))
    return jnp.asarray(rng.standard_normal((n, D)), dtype), routing, jnp.asarray(gates), weights


def _numpy(x, experts, gates, weights):
    """The equation, token by token, in float64."""
    x, gates, w_gate, w_up, w_down = (np.asarray(a, np.float64) for a in (x, gates, *weights))
    experts = np.asarray(experts)
    y = np.zeros(x.shape)
    for n, slot in itertools.product(*map(range, experts.shape)):
        e = experts[n, slot]
        y[n] += gates[n, slot] * transformer_numpy.swiglu(x[n], w_gate[e], w_up[e], w_down[e])
    return y


@functools.partial(jax.jit, static_argnames=("implementation", "mesh"))
def _run(x, experts, gates, weights, *, implementation, mesh):
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(x.shape), jnp.float32)

    def loss(x, gates, weights):
        y = apply_experts(x, experts, gates, *weights, implementation=implementation, mesh=mesh)
        return jnp.sum(y.astype(jnp.float32) * cotangent), y

    (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(x, gates, weights)
    return y, grads


def _value_and_grads(implementation, x, experts, gates, weights, mesh=None):
    return _run(x, experts, gates, tuple(weights), implementation=implementation, mesh=mesh)


def _close(got, want, rtol=2e-5):
    """Relative to the largest entry of each array."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(1e-3, np.abs(b).max()))


# n = 7 walks blocks of 8 rows, 40 of 16 and 400 of 64 and 700 of 128.
@pytest.mark.parametrize("n", first_quick(2, [40, 400, 7, 700]))
@pytest.mark.parametrize("load", LOADS)
def test_equal_to_dense_and_numpy(load, n):
    problem = _problem(load, n, k=2)
    want = _value_and_grads("dense", *problem)
    _close(want[0], _numpy(*problem))
    for implementation in ("blocks", "grouped"):
        _close(_value_and_grads(implementation, *problem), want)


@pytest.mark.parametrize("k", first_quick(1, [3, 1, 4]))
def test_any_number_of_experts_per_token(k):
    problem = _problem("skewed", 40, k)
    want = _value_and_grads("dense", *problem)
    _close(want[0], _numpy(*problem))
    for implementation in ("blocks", "grouped"):
        _close(_value_and_grads(implementation, *problem), want)


def test_a_group_that_ends_with_its_block():
    """Loads of exactly one block (8 and 16 rows), one more and one less, and none."""
    for counts in ((16, 16, 16, 16, 16), (17, 15, 32, 16, 0), (0, 0, 1, 79, 0), (80, 0, 0, 0, 0)):
        experts = jnp.asarray(np.repeat(np.arange(E), counts)[:, None].astype(np.int32))
        x, _, gates, weights = _problem("uniform", 80, 1)
        problem = x, experts, gates, weights
        _close(_value_and_grads("blocks", *problem), _value_and_grads("dense", *problem))


@pytest.mark.parametrize("n", [40, 700])
def test_gate_zero_removes_the_pair(n):
    x, experts, gates, weights = _problem("uniform", n, 2)
    gates = gates.at[:, 1].set(0.0)
    run = jax.jit(functools.partial(apply_experts, implementation="blocks"))
    _close(run(x, experts, gates, *weights), run(x, experts[:, :1], gates[:, :1], *weights))


@pytest.mark.parametrize("implementation", ["blocks", "grouped"])
@pytest.mark.parametrize("n", first_quick(1, [40, 160]))
def test_inside_a_rematerialised_scan(implementation, n):
    x, _, gates, weights = _problem("uniform", n, 2)
    layers = 3
    stacked = jax.tree.map(lambda w: jnp.stack([w, w * 0.5, -w]), weights)
    routing = jnp.asarray(np.stack([_routing(load, n, 2) for load in LOADS[:layers]]))

    def loss(x, gates, stacked, implementation, remat):
        def layer(x, inputs):
            experts, weights = inputs
            return x + apply_experts(x, experts, gates, *weights, implementation=implementation), None

        body = jax.checkpoint(layer) if remat else layer
        return jnp.mean(jax.lax.scan(body, x, (routing, stacked))[0] ** 2)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), static_argnums=(3, 4))
    want = run(x, gates, stacked, "dense", False)
    _close(run(x, gates, stacked, implementation, True), want)


@pytest.mark.parametrize("n", first_quick(1, [40, 700]))
def test_bfloat16_accumulates_in_float32(n):
    """Against float64 of the same bfloat16 inputs: 2e-2 of the largest entry (the mantissa has 8 bits: 4e-3 a rounding,
    and the state, the hidden layer and the result are each rounded)."""
    problem = _problem("skewed", n, 2, jnp.bfloat16)
    want = _value_and_grads("dense", *problem)
    for implementation in ("dense", "blocks", "grouped"):
        y, grads = _value_and_grads(implementation, *problem)
        assert y.dtype == jnp.bfloat16
        assert grads[1].dtype == jnp.float32
        _close(y, _numpy(*problem), rtol=2e-2)
        _close(grads, want[1], rtol=2e-2)


@pytest.mark.parametrize(
    "shape", first_quick(2, [(1, 2, 2, 1), (1, 1, 1, 4), (4, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1)])
)
@pytest.mark.parametrize("implementation", ["blocks", "dense", "grouped"])
def test_every_mesh(shape, implementation):
    """Rows, experts and width sharded where the mesh says so: one device's numbers."""
    mesh = sharding.make_mesh(shape)
    x, experts, gates, weights = _problem("skewed", 48, 2, num_experts=4)
    want = _value_and_grads("dense", x, experts, gates, weights)
    axes = [("expert", "embed", "mlp"), ("expert", "embed", "mlp"), ("expert", "mlp", "embed")]
    placed = jax.device_put(list(weights), sharding.shardings(axes, list(weights), mesh))
    rows = sharding.rows(mesh)
    got = _value_and_grads(implementation, *(jax.device_put(a, rows) for a in (x, experts, gates)), placed, mesh=mesh)
    _close(got, want)


def test_rows_that_the_mesh_does_not_divide():
    mesh = sharding.make_mesh((4, 1, 1, 1))
    problem = _problem("uniform", 7, 2)
    _close(_value_and_grads("blocks", *problem, mesh=mesh), _value_and_grads("dense", *problem))


def test_choice(monkeypatch):
    assert choose_implementation("auto") == "blocks"
    assert choose_implementation("auto", sharding.make_mesh((2, 2, 1, 1))) == "blocks"
    assert choose_implementation("auto", sharding.make_mesh((2, 1, 2, 1))) == "blocks"
    assert choose_implementation("grouped", sharding.make_mesh((1, 1, 1, 4))) == "grouped"
    for platform in ("gpu", "tpu"):
        monkeypatch.setattr(sharding, "platform", lambda mesh, platform=platform: platform)
        assert choose_implementation("auto") == "grouped"


def test_nothing_of_all_experts_times_all_tokens_is_allocated():
    """Blocks keep two pre-activations a pair; the dense form holds every expert's for every token."""
    n, k, num_experts = 2048, 2, 32
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((n, D)), jnp.float32)
    weights = tuple(jnp.ones((num_experts, *s), jnp.float32) for s in ((D, F), (D, F), (F, D)))
    routing = jnp.asarray(_routing("uniform", n, k, num_experts))
    gates = jnp.ones((n, k), jnp.float32)

    def temporary(implementation):
        def loss(x, weights):
            return jnp.sum(apply_experts(x, routing, gates, *weights, implementation=implementation) ** 2)

        return jax.jit(jax.grad(loss, (0, 1))).lower(x, weights).compile().memory_analysis().temp_size_in_bytes

    assert temporary("blocks") < temporary("dense") / 4


def test_more_pairs_than_a_word_holds_are_refused():
    pairs = jax.ShapeDtypeStruct((2**22, 8), jnp.int32)
    with pytest.raises(ValueError, match="micro_batch_rows"):
        jax.eval_shape(lambda experts: group_by_expert(experts, 256), pairs)


def test_what_a_product_leaves_in_rows_of_no_expert_is_not_read():
    """A kernel may leave anything there: pairs of the third expert, which is on another device, add nothing."""
    x, _, _, weights = _problem("uniform", 3, 2, num_experts=3)
    experts, gates = jnp.asarray([[0, 2], [1, 2], [2, 0]]), jnp.asarray([[0.5, 0.25], [0.75, 0.5], [0.25, 1.0]])

    def dot(rows, weights, *, counts):
        ends, row = jnp.cumsum(counts), jnp.arange(len(rows))
        own = jnp.minimum(jnp.searchsorted(ends, row, side="right"), len(weights) - 1)
        return jnp.where(row[:, None] < ends[-1], jnp.einsum("md,mdf->mf", rows, weights[own]), 1e6)

    def out(x, given):
        return grouped_experts(dot, x, experts, gates, given)

    here, absent = (tuple(w[:2] for w in weights), tuple(w.at[2].set(0) for w in weights))
    np.testing.assert_allclose(out(x, here), _numpy(x, experts, gates, absent), rtol=1e-5, atol=1e-6)
    whole = jax.grad(lambda x: jnp.sum(jnp.sin(apply_experts(x, experts, gates, *absent, implementation="dense"))))(x)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(jnp.sin(out(x, here))))(x), whole, rtol=1e-4, atol=1e-5)
