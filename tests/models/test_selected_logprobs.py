"""Chunked log-probs and entropies against the plain log-softmax, in value and gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import selected_logprobs as module
from jaxrl_llm.models.selected_logprobs import selected_logprobs

D, V = 8, 40


@pytest.fixture(params=["kept", "recomputed"])
def path(request, monkeypatch):
    """Both forms: everything in one chunk with its probabilities, and chunks of 8 tokens that recompute."""
    monkeypatch.setattr(module, "_CHUNK", 8)
    monkeypatch.setattr(module, "_KEEP", 2**22 if request.param == "kept" else 0)
    return request.param


def _problem(n, dtype=jnp.float32):
    rng = np.random.default_rng(n)
    hidden = jnp.asarray(rng.standard_normal((n, D)) * 2, dtype)
    head = jnp.asarray(rng.standard_normal((D, V)), dtype)
    return hidden, head, jnp.asarray(rng.integers(0, V, n))


def _plain(hidden, head, targets, temperature=1.0):
    logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32) / temperature
    log_probs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_probs, targets[:, None], 1)[:, 0], -jnp.sum(jnp.exp(log_probs) * log_probs, -1)


def _loss(function, weight_entropy, hidden, head, targets):
    logprob, entropy = function(hidden, head, targets)
    ramp = jnp.linspace(-1.0, 1.0, targets.size)
    return jnp.sum(logprob * ramp) + (jnp.sum(jnp.cos(entropy) * ramp) if weight_entropy else 0.0)


def test_by_hand(path):
    """hidden 1, head (0, log 3): p = (1/4, 3/4); H = -(1/4) log(1/4) - (3/4) log(3/4) = log 4 - (3/4) log 3."""
    head = jnp.asarray([[0.0, np.log(3.0)]])
    logprob, entropy = selected_logprobs(jnp.ones((1, 1)), head, jnp.asarray([1]))
    np.testing.assert_allclose(logprob, [np.log(0.75)], rtol=1e-6)
    np.testing.assert_allclose(entropy, [np.log(4) - 0.75 * np.log(3)], rtol=1e-6)


@pytest.mark.parametrize("n", [1, 24, 31])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values(path, n, temperature):
    got = jax.jit(functools.partial(selected_logprobs, temperature=temperature))(*_problem(n))
    for a, b in zip(got, jax.jit(_plain, static_argnums=3)(*_problem(n), temperature), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert a.dtype == jnp.float32


@pytest.mark.parametrize("weight_entropy", [False, True])
@pytest.mark.parametrize("n", [24, 31])
def test_gradients(path, n, weight_entropy):
    hidden, head, targets = _problem(n)
    ours, plain = (functools.partial(f, temperature=0.7) for f in (selected_logprobs, _plain))
    grads = [jax.jit(jax.grad(functools.partial(_loss, f, weight_entropy), (0, 1))) for f in (ours, plain)]
    for a, b in zip(grads[0](hidden, head, targets), grads[1](hidden, head, targets), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_entropy_alone(path):
    hidden, head, targets = _problem(24)
    grads = [
        jax.jit(jax.grad(lambda h, w, f=f: jnp.sum(f(h, w, targets)[1]), (0, 1)))(hidden, head)
        for f in (selected_logprobs, _plain)
    ]
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_extreme_logits_stay_finite(path):
    """One logit 1e4 above the rest: log p = 0 or -1e4, entropy 0, all gradients finite."""
    hidden, head, targets = jnp.ones((2, 1)), jnp.asarray([[1e4, 0.0, 0.0]]), jnp.asarray([0, 1])
    logprob, entropy = selected_logprobs(hidden, head, targets)
    np.testing.assert_allclose(logprob, [0.0, -1e4])
    np.testing.assert_allclose(entropy, 0.0, atol=1e-3)
    grads = jax.jit(jax.grad(functools.partial(_loss, selected_logprobs, True), (0, 1)))(hidden, head, targets)
    assert all(np.isfinite(g).all() for g in grads)


def test_bfloat16(path):
    """Logits and log-probs are float32; the backward's products are rounded (8 bits): 2e-2 of the largest entry."""
    hidden, head, targets = _problem(24, jnp.bfloat16)
    for a, b in zip(selected_logprobs(hidden, head, targets), _plain(hidden, head, targets), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    got, want = (jax.jit(jax.grad(functools.partial(_loss, f, True), (0, 1))) for f in (selected_logprobs, _plain))
    exact = want(hidden.astype(jnp.float32), head.astype(jnp.float32), targets)
    for a, b in zip(got(hidden, head, targets), exact, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=2e-2 * np.abs(b).max())


@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (2, 2, 1, 1), (1, 1, 2, 2)])
def test_every_device_walks_its_own_tokens(path, shape, monkeypatch):
    """Values and gradients inside shard_map: tokens over all devices, the head in parts that are gathered."""
    monkeypatch.setattr(module, "_CHUNK", 2)
    mesh = sharding.make_mesh(shape)
    hidden, head, targets = _problem(24)

    def run(*args, mesh=None):
        logprobs = functools.partial(selected_logprobs, mesh=mesh)
        return jax.jit(jax.value_and_grad(functools.partial(_loss, logprobs, True), (0, 1)))(*args)

    placed = (
        jax.device_put(hidden, sharding.rows(mesh)),
        jax.device_put(head, sharding.shardings([("embed", "vocab")], [head], mesh)[0]),
        jax.device_put(targets, sharding.rows(mesh)),
    )
    found, want = (jax.tree.leaves(x) for x in (run(*placed, mesh=mesh), run(hidden, head, targets)))
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_memory_follows_the_chunk_not_the_batch(monkeypatch):
    """Forward and backward hold a few arrays of [chunk, vocabulary]; the plain form holds [tokens, vocabulary]."""
    n, vocab, chunk = 2048, 4096, 128
    monkeypatch.setattr(module, "_KEEP", 0)
    monkeypatch.setattr(module, "_CHUNK", chunk)
    args = (jnp.ones((n, D)), jnp.ones((D, vocab)), jnp.zeros(n, jnp.int32))

    def temporary(function):
        compiled = jax.jit(jax.grad(functools.partial(_loss, function, False), (0, 1))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(selected_logprobs) < 4 * chunk * vocab * 4
    assert temporary(_plain) > n * vocab * 4


def test_refusals():
    with pytest.raises(ValueError, match=r"temperature=0.0 must be positive"):
        selected_logprobs(*_problem(4), temperature=0.0)
