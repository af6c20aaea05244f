"""Chunked log-probs and entropies against the plain log-softmax, in value and gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import selected_logprobs as module
from jaxrl_llm.models.selected_logprobs import selected_logprobs
from tests.reference.slowly import first_quick

D, V = 8, 40


@pytest.fixture(params=["one chunk", "kept", "recomputed"])
def path(request, monkeypatch):
    """Everything in one chunk with its probabilities, and chunks of 8 tokens that keep them or recompute."""
    monkeypatch.setattr(module, "score_chunk", lambda platform: 8)
    monkeypatch.setattr(module, "_ONE_CHUNK", 2**22 if request.param == "one chunk" else 0)
    if request.param == "recomputed":
        monkeypatch.setattr(module, "kept_probabilities", lambda *_: 0)
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


@pytest.mark.parametrize("n", first_quick(1, [31, 24, 1]))
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values(path, n, temperature):
    got = jax.jit(functools.partial(selected_logprobs, temperature=temperature))(*_problem(n))
    for a, b in zip(got, jax.jit(_plain, static_argnums=3)(*_problem(n), temperature), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert a.dtype == jnp.float32


@pytest.mark.parametrize("weight_entropy", [False, True])
@pytest.mark.parametrize("n", first_quick(1, [31, 24]))
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


@pytest.mark.parametrize("shape", first_quick(1, [(2, 2, 1, 1), (1, 1, 1, 4), (1, 1, 2, 2)]))
def test_every_device_walks_its_own_tokens(path, shape, monkeypatch):
    """Values and gradients inside shard_map: tokens over all devices, the head in parts that are gathered."""
    monkeypatch.setattr(module, "score_chunk", lambda platform: 2)
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


def test_no_chunk_is_larger_than_its_bound():
    """Ten tokens in chunks of at most four are three of four, two of whose places are padding; each takes every third
    token, so that tokens stay on their devices."""
    cut = module.in_chunks(jnp.arange(1, 11), 4)
    assert cut.tolist() == [[1, 4, 7, 10], [2, 5, 8, 0], [3, 6, 9, 0]]
    assert module.from_chunks(cut, 10).tolist() == list(range(1, 11))
    assert module.in_chunks(jnp.arange(1, 9), 4).tolist() == [[1, 3, 5, 7], [2, 4, 6, 8]]
    assert module.in_chunks(jnp.arange(1, 3), 4).tolist() == [[1, 2]]


def test_memory_follows_the_chunk_not_the_batch(monkeypatch):
    """Forward and backward hold a few arrays of [chunk, vocabulary]; the plain form holds [tokens, vocabulary]."""
    n, vocab, chunk = 2048, 4096, 128
    monkeypatch.setattr(module, "_ONE_CHUNK", 0)
    monkeypatch.setattr(module, "score_chunk", lambda platform: chunk)
    args = (jnp.ones((n, D)), jnp.ones((D, vocab)), jnp.zeros(n, jnp.int32))

    def temporary(function, transform=lambda f: jax.grad(f, (0, 1))):
        compiled = jax.jit(transform(functools.partial(_loss, function, False))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few = 4 * chunk * vocab * 4
    assert temporary(selected_logprobs, lambda f: f) < few
    assert n * vocab * 4 < temporary(selected_logprobs) < n * vocab * 4 + few
    monkeypatch.setattr(module, "kept_probabilities", lambda *_: 0)
    assert temporary(selected_logprobs) < few
    assert temporary(_plain) > n * vocab * 4


def test_refusals():
    with pytest.raises(ValueError, match=r"temperature=0.0 must be positive"):
        selected_logprobs(*_problem(4), temperature=0.0)


def _kept_problem():
    """Sets of 1 to 5 tokens that hold the target, and a token without a set."""
    hidden, head, targets = _problem(12)
    kept = np.full((12, 5), -1, np.int32)
    rng = np.random.default_rng(1)
    for row in range(11):
        others = rng.permutation(np.delete(np.arange(V), targets[row]))[: row % 5]
        kept[row, : 1 + len(others)] = rng.permutation([*others, int(targets[row])])
    return hidden, head, targets, jnp.asarray(kept)


def _kept_loss(hidden, head, targets, kept):
    """`_loss` at temperature 0.7 in NumPy, one token after the other, each over its own set."""
    total, ramp = 0.0, np.linspace(-1.0, 1.0, len(targets))
    for row, target in enumerate(targets):
        ids = [i for i in kept[row] if i >= 0] or range(V)
        weights = {i: np.exp(hidden[row] @ head[:, i] / 0.7) for i in ids}
        p = {i: weight / sum(weights.values()) for i, weight in weights.items()}
        entropy = -sum(one * np.log(one) for one in p.values())
        total += ramp[row] * (np.log(p[int(target)]) + np.cos(entropy))
    return total


@pytest.mark.parametrize("shape", [None, (1, 1, 1, 4)], ids=str)
def test_a_softmax_over_what_was_kept(path, shape):
    """Value and gradient against finite differences in float64 of a loop that knows the kept tokens alone."""
    *args, kept = _kept_problem()
    mesh = None if shape is None else sharding.make_mesh(shape)
    scored = functools.partial(selected_logprobs, temperature=0.7, kept=kept, mesh=mesh)
    value, found = jax.jit(jax.value_and_grad(functools.partial(_loss, scored, True), (0, 1)))(*args)
    arrays = [np.asarray(x, np.float64) for x in args[:2]]
    rest = np.asarray(args[2]), np.asarray(kept)
    np.testing.assert_allclose(value, _kept_loss(*arrays, *rest), rtol=1e-5)
    rng, step = np.random.default_rng(2), 1e-6
    for which, gradient in enumerate(found):
        for _ in range(8):  # along directions: one entry at a time would be 416 loops
            direction = rng.normal(size=gradient.shape)
            ends = []
            for sign in (1, -1):
                moved = list(arrays)
                moved[which] = arrays[which] + sign * step * direction
                ends.append(_kept_loss(*moved, *rest))
            np.testing.assert_allclose(
                np.sum(gradient * direction), (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=1e-4
            )


def test_the_policy_gradient_of_cut_samples_has_no_bias():
    """Six tokens, all of them enumerated: the mean of R grad log p over samples of the cut distribution is the gradient
    of its mean reward where log p is over the kept tokens, and another one where it is over all."""
    logits, rewards = np.array([1.2, 0.9, 0.1, -0.3, -0.8, -2.0]), np.array([1.0, 0.0, 2.0, -1.0, 3.0, 0.5])
    kept = np.array([0, 1, 2, 3])  # a top-k of 4

    def cut(logits):
        weights = np.exp(logits[kept])
        return weights / weights.sum()

    drawn, step = cut(logits), 1e-6
    # Of the mean reward, by finite differences.
    exact = np.array([(cut(logits + e) - cut(logits - e)) @ rewards[kept] / (2 * step) for e in step * np.eye(6)])

    @jax.jit
    def mean_gradient(kept):
        def loss(head):
            logprobs = selected_logprobs(jnp.ones((4, 1)), head, jnp.arange(4), kept=kept)[0]
            return jnp.sum(jnp.asarray(drawn * rewards[:4], jnp.float32) * logprobs)

        return jax.grad(loss)(jnp.asarray(logits, jnp.float32)[None])[0]

    np.testing.assert_allclose(mean_gradient(jnp.tile(kept, (4, 1))), exact, atol=1e-6)
    assert np.abs(mean_gradient(jnp.full((4, 1), -1)) - exact).max() > 0.02
