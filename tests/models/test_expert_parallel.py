"""Tokens that move to their experts: values, gradients and routing of every way against the dense form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from experiments.scale.hlo import parse
from experiments.scale.hlo_cost import measure
from jaxrl_llm.ground import sharding
from jaxrl_llm.models.experts import expert_parallel, grouped_matmul
from jaxrl_llm.models.experts.implementations import apply_experts
from tests.reference.grouped_rows import interpreted
from tests.reference.slowly import first_quick

N, K, D, F, E = 24, 2, 6, 10, 8
AXES = [("expert", "embed", "mlp"), ("expert", "embed", "mlp"), ("expert", "mlp", "embed")]


def problem(load="uniform"):
    """uniform; skewed: expert 3 is in most tokens; one: all tokens to the same two experts, of one device."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((N, E)) + {"uniform": 0, "skewed": 3.0, "one": 1e3}[load] * (np.arange(E) // 2 == 1)
    experts = np.argsort(-logits, axis=-1)[:, :K].astype(np.int32)
    weights = [rng.standard_normal(s).astype(np.float32) / 3 for s in ((E, D, F), (E, D, F), (E, F, D))]
    x, gates = rng.standard_normal((N, D)).astype(np.float32), rng.random((N, K)).astype(np.float32)
    return tuple(map(jnp.asarray, (x, experts, gates))), [jnp.asarray(w) for w in weights]


def value_and_grads(tokens, weights, implementation, mesh=None):
    """Compiled anew each time, since tests replace what it calls."""
    x, experts, gates = tokens
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(x.shape), jnp.float32)
    if mesh is not None:
        weights = jax.device_put(weights, sharding.shardings(AXES, weights, mesh))
        x, experts, gates = jax.device_put((x, experts, gates), sharding.rows(mesh))

    @jax.jit
    def run(x, experts, gates, weights):
        def loss(x, gates, weights):
            y = apply_experts(x, experts, gates, *weights, implementation=implementation, mesh=mesh)
            return jnp.sum(y * cotangent), y

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(x, gates, weights)

    (_, y), gradients = run(x, experts, gates, weights)
    return y, gradients


@functools.cache
def dense(load):
    return value_and_grads(*problem(load), "dense")


def assert_close(got, want, tolerance=2e-6):
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What jax.lax documents, by gathering everything: XLA:CPU has none."""
    me = lax.axis_index(axis_name)
    everything, starts, sizes, places = (
        lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    row = jnp.arange(len(output))[None]
    start, size, place = (a[:, me][:, None] for a in (starts, sizes, places))
    comes = (row >= place) & (row < place + size)  # [from, row]
    index = jnp.clip(start + row - place, 0, len(operand) - 1)
    values = jax.vmap(lambda rows, i: rows[i])(everything, index)
    found = jnp.sum(jnp.where(comes[..., None], values, 0), axis=0)
    assert recv_sizes.shape == send_sizes.shape
    return jnp.where(jnp.any(comes, axis=0)[:, None], found, output)


@pytest.mark.parametrize("load", first_quick(1, ["one", "skewed", "uniform"]))
@pytest.mark.parametrize(
    ("shape", "implementation"),
    [
        ((1, 1, 4, 1), "blocks"),
        pytest.param((1, 2, 2, 1), "grouped", marks=pytest.mark.slow),
        ((1, 1, 2, 2), "grouped"),
    ],
)
def test_every_load(shape, implementation, load):
    """All tokens to one device take several rounds: over four devices 12 pairs of each, 9 and then one at a time."""
    assert_close(value_and_grads(*problem(load), implementation, sharding.make_mesh(shape)), dense(load))


@pytest.mark.parametrize(("load", "shape"), [("uniform", (2, 1, 2, 1)), ("one", (1, 1, 4, 1))])
def test_ragged(load, shape, monkeypatch):
    """What TPUs run, with their all-to-all done by hand."""
    monkeypatch.setattr(expert_parallel.lax, "ragged_all_to_all", ragged_all_to_all)
    axes = expert_parallel.Axes
    monkeypatch.setattr(expert_parallel, "Axes", lambda *args, ragged: axes(*args, ragged=True))
    assert_close(value_and_grads(*problem(load), "grouped", sharding.make_mesh(shape)), dense(load))


@pytest.mark.parametrize("shape", first_quick(1, [(1, 2, 2, 1), (2, 2, 1, 1), (1, 2, 1, 2)]), ids=str)
def test_weights_in_slices_that_are_gathered_by_hand(shape, monkeypatch):
    """As on TPUs: each device holds a slice of d, and the gradient comes back to it."""
    monkeypatch.setattr(sharding, "platform", lambda mesh: "tpu")
    monkeypatch.setattr(expert_parallel.lax, "ragged_all_to_all", ragged_all_to_all)
    assert_close(value_and_grads(*problem(), "blocks", sharding.make_mesh(shape)), dense("uniform"))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["gpu", "tpu"])
def test_kernels_of_other_platforms(kernel, monkeypatch):
    """Interpreted where each device calls them: tokens that moved, and each device's part of the width."""
    monkeypatch.setattr(grouped_matmul, "grouped_matmul", functools.partial(interpreted, kernel=kernel))
    assert_close(value_and_grads(*problem("skewed"), "grouped", sharding.make_mesh((1, 1, 2, 2))), dense("skewed"))


def test_tokens_that_the_devices_do_not_divide():
    (x, experts, gates), weights = problem()
    few = x[:7], experts[:7], gates[:7]
    mesh = sharding.make_mesh((1, 1, 4, 1))
    placed = jax.device_put(weights, sharding.shardings(AXES, weights, mesh))
    run = jax.jit(functools.partial(apply_experts, implementation="blocks", mesh=mesh))
    assert_close(run(*few, *placed), apply_experts(*few, *weights, implementation="dense"))


def compiled_cost(f, tokens, weights, mesh):
    """What a program costs outside its loops over blocks of rows."""
    where = [sharding.rows(mesh)] * 3 + sharding.shardings(AXES, weights, mesh)
    args = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to) for a, to in zip((*tokens, *weights), where, strict=True)
    ]
    return measure(parse(jax.jit(f).lower(*args).compile().as_text()), mesh.size)[0]


@pytest.mark.slow
def test_weights_of_experts_stay_where_they_are():
    """On a mesh of experts only tokens travel: what is sent is known to the byte, and nothing is gathered."""
    mesh = sharding.make_mesh((1, 1, 4, 1))
    tokens, weights = problem()

    def forward(x, experts, gates, *weights):
        return apply_experts(x, experts, gates, *weights, implementation="blocks", mesh=mesh)

    def gradients(x, experts, gates, *weights):
        def loss(x, gates, weights):
            return jnp.sum(forward(x, experts, gates, *weights) ** 2)

        return jax.grad(loss, argnums=(0, 1, 2))(x, gates, weights)

    # An even load is 3 pairs for each device: 3 + 3 sqrt(3) in the first round, 3 / 8 in a second, both rounded up. A
    # quarter of them stays.
    pair = 4 * (4 * (9 + 1)) * 3 / 4  # bytes sent of one number a pair
    once = compiled_cost(forward, tokens, weights, mesh)
    assert once.collectives["all-to-all"] == (8.0, pair * (2 * D + 2))  # x there, y back, expert and gate
    assert set(once.collectives) == {"all-to-all", "all-reduce"}
    assert once.collectives["all-reduce"][1] == 2 * 4 * 3 / 4, "nothing but the number of rounds is reduced"
    assert once.flops == 0, "a matmul outside the loop over blocks: the dense form is back"

    both = compiled_cost(gradients, tokens, weights, mesh)
    there, back = 2 * D + 2, D + 1  # x, its cotangent, expert, gate; gradients of x and of the gate
    shared = 4 * (4 * 9) * 3 / 4 * (D + 2)  # the first round's x, expert and gate, which XLA:CPU sends once for both
    assert both.collectives["all-to-all"] == (17.0, pair * (2 * D + 2 + there + back) - shared)
    assert set(both.collectives) == {"all-to-all", "all-reduce"}
    # The number of rounds in either direction, which XLA may compute once.
    assert both.collectives["all-reduce"][1] <= 2 * 2 * 4 * 3 / 4, "gradients of experts are reduced"
    assert both.flops == 0, "a matmul outside the loop over blocks: the dense form is back"
