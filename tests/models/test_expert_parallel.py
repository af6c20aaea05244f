"""Tokens that move to their experts: values, gradients and routing of every way against the dense form."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxrl_llm import sharding
from jaxrl_llm.models import expert_parallel
from jaxrl_llm.models import experts as experts_module
from jaxrl_llm.models.experts import apply_experts
from jaxrl_llm.models.grouped_matmul import _by_tiles, grouped_matmul
from jaxrl_llm.planning.cost import measure
from jaxrl_llm.planning.hlo import parse

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


@pytest.mark.parametrize("load", ["uniform", "skewed", "one"])
@pytest.mark.parametrize(
    ("shape", "implementation"), [((1, 1, 4, 1), "blocks"), ((1, 2, 2, 1), "grouped"), ((1, 1, 2, 2), "grouped")]
)
def test_every_load(shape, implementation, load, monkeypatch):
    """A buffer without slack: skewed loads take several rounds, other loads on other devices fewer."""
    monkeypatch.setattr(expert_parallel, "SLACK", 1.0)
    assert_close(value_and_grads(*problem(load), implementation, sharding.make_mesh(shape)), dense(load))


@pytest.mark.parametrize(("load", "shape"), [("uniform", (2, 1, 2, 1)), ("one", (1, 1, 4, 1))])
def test_ragged(load, shape, monkeypatch):
    """What TPUs run, with their all-to-all done by hand."""
    monkeypatch.setattr(expert_parallel.lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(experts_module, "Axes", lambda *args, ragged: expert_parallel.Axes(*args, ragged=True))
    assert_close(value_and_grads(*problem(load), "grouped", sharding.make_mesh(shape)), dense(load))


def test_tokens_that_the_devices_do_not_divide():
    (x, experts, gates), weights = problem()
    few = x[:7], experts[:7], gates[:7]
    mesh = sharding.make_mesh((1, 1, 4, 1))
    placed = jax.device_put(weights, sharding.shardings(AXES, weights, mesh))
    run = jax.jit(functools.partial(apply_experts, implementation="blocks", mesh=mesh))
    assert_close(run(*few, *placed), apply_experts(*few, *weights, implementation="dense"))


def test_weights_of_experts_stay_where_they_are():
    """On a mesh of experts only tokens travel: what is sent is known to the byte, and nothing is gathered."""
    mesh = sharding.make_mesh((1, 1, 4, 1))
    (x, experts, gates), weights = problem()
    rows = sharding.rows(mesh)
    where = sharding.shardings(AXES, weights, mesh)

    def abstract(a, to):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)

    def forward(x, experts, gates, *weights):
        return apply_experts(x, experts, gates, *weights, implementation="blocks", mesh=mesh)

    args = [abstract(a, rows) for a in (x, experts, gates)] + [
        abstract(w, to) for w, to in zip(weights, where, strict=True)
    ]
    once, _ = measure(parse(jax.jit(forward).lower(*args).compile().as_text()), mesh.size)
    rows = 4 * 8  # to and from each device 8 pairs at most, which is SLACK x 3 rounded up to what is worth sending
    sent = 4 * rows * (2 * D + 2) * 3 / 4  # x there, y back, expert and gate; a quarter of the rows stays
    assert once.collectives["all-to-all"] == (4.0, sent)
    assert set(once.collectives) == {"all-to-all", "all-reduce"}
    assert once.collectives["all-reduce"][1] == 2 * 4 * 3 / 4, "nothing but the number of rounds is reduced"
    assert once.flops == 0, "a matmul outside the loop over blocks: the dense form is back"


@pytest.mark.parametrize("counts", [(3, 0, 5, 2), (0, 0, 0, 10), (1, 2, 3, 4)])
def test_the_kernel_of_tpus(counts):
    """Interpreted, 13 rows of which 10 belong to groups: equal to a loop, 0 past the last group, in both directions."""
    rng = np.random.default_rng(0)
    rows, weights, cotangent = (
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((13, 128), (4, 128, 256), (13, 256))
    )
    sizes, starts = jnp.asarray(counts, jnp.int32), np.cumsum((0, *counts))

    def by_tiles(rows, weights):
        used = (jnp.arange(13) < 10)[:, None]
        return jnp.where(used, _by_tiles(jnp.where(used, rows, 0), weights, sizes, True), 0)

    def loop(rows, weights):
        parts = [rows[a:b] @ w for (a, b), w in zip(itertools.pairwise(starts.tolist()), weights, strict=True)]
        return jnp.concatenate([*parts, jnp.zeros((3, 256))])

    want, pull = jax.vjp(loop, rows, weights)
    for f in (by_tiles, functools.partial(grouped_matmul, counts=sizes, platform="cpu")):
        got, back = jax.vjp(f, rows, weights)
        assert_close((got, back(cotangent)), (want, pull(cotangent)), 1e-5)
