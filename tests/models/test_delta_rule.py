"""The gated delta rule in chunks against a loop over tokens in numpy, and transformers' two forms of it."""

import functools
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import delta_rule as rule

HEADS, KEY, VALUE, TIME = 2, 4, 3, 11


def drawn(time, rows=1, seed=0):
    """(queries, keys, values, log decay, beta) with strong decays and betas near 1."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((rows, time, HEADS, n)).astype(np.float32) for n in (KEY, KEY, VALUE))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -rng.exponential(0.5, (rows, time, HEADS)), rng.uniform(0.2, 1, (rows, time, HEADS))
    return q, k, v, g.astype(np.float32), beta.astype(np.float32)


def looped(q, k, v, g, beta, segments, state):
    """Token by token in float64, for one row."""
    out, before = np.zeros(v[0].shape), segments[0]
    state = state[0].astype(np.float64)
    for t, segment in enumerate(segments):
        if segment == 0:
            continue
        if segment != before:
            state, before = np.zeros_like(state), segment
        for h in range(HEADS):
            old = np.exp(float(g[0, t, h])) * state[h]
            u = beta[0, t, h] * (v[0, t, h] - k[0, t, h] @ old)
            state[h] = old + np.outer(k[0, t, h], u)
            out[t, h] = q[0, t, h] @ state[h]
    return out, state


@functools.partial(jax.jit, static_argnames="chunk")
def chunked(arrays, segments, state, chunk):
    real = (segments != 0)[..., None]
    g, beta = (jnp.where(real, x, 0) for x in arrays[3:])
    return rule.delta_rule(*arrays[:3], g, beta, rule.order_of(segments), state, chunk)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_every_boundary_of_segments_and_chunks(chunk):
    """Two segments that meet anywhere, the first going on from a state, then padding."""
    arrays, state = drawn(TIME), np.random.default_rng(1).standard_normal((1, HEADS, KEY, VALUE)).astype(np.float32)
    for first in range(1, TIME):
        for end in {min(first + 1, TIME), TIME - 1, TIME}:
            segments = np.array([1] * first + [2] * (end - first) + [0] * (TIME - end))
            expected, last = looped(*arrays, segments, state)
            out, held = chunked(arrays, segments[None], state, chunk)
            np.testing.assert_allclose(out[0, :end], expected[:end], atol=5e-6)
            np.testing.assert_allclose(held[0], last, atol=5e-6)


def test_many_segments_of_one_token_in_a_chunk():
    arrays, state = drawn(TIME), np.ones((1, HEADS, KEY, VALUE), np.float32)
    segments = np.array([1, 2, 3, 3, 4, 5, 5, 5, 6, 0, 0])
    expected, last = looped(*arrays, segments, state)
    out, held = chunked(arrays, segments[None], state, 4)
    np.testing.assert_allclose(out[0, :9], expected[:9], atol=5e-6)
    np.testing.assert_allclose(held[0], last, atol=5e-6)


def test_gradients_are_those_of_single_tokens():
    """Chunks of four against chunks of one, which are the recurrence, over a border of segments."""
    segments = np.array([[1] * 6 + [2] * 4 + [0]])
    state = np.random.default_rng(1).standard_normal((1, HEADS, KEY, VALUE)).astype(np.float32)
    weights = np.random.default_rng(2).standard_normal((1, TIME, HEADS, VALUE)).astype(np.float32)

    def loss(arrays, state, chunk):
        out, held = chunked(arrays, segments, state, chunk)
        return jnp.sum(out * weights) + jnp.sum(held**2)

    found, expected = (jax.grad(loss, (0, 1))(drawn(TIME), state, chunk) for chunk in (4, 1))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected)


def test_convolution_sees_its_own_segment():
    rng = np.random.default_rng(0)
    x, weight, before = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 7, 2), (2, 4), (1, 3, 2)))
    for segments in ([1] * 7, [1, 1, 2, 2, 2, 3, 3], [1, 1, 1, 2, 0, 0, 0], [0] * 7):
        ids, padded = np.array([segments]), np.concatenate([before, x], axis=1)[0]
        order = np.asarray(rule.order_of(jnp.asarray(ids)))[0]
        out, held = jax.jit(rule.causal_convolution)(x, weight, before, order[None], ids != 0)
        of = np.concatenate([[0] * 3, order])
        expected = [sum((of[t + j] == order[t]) * padded[t + j] * weight[:, j] for j in range(4)) for t in range(7)]
        np.testing.assert_allclose(out[0], expected, atol=1e-6)
        count = sum(segment != 0 for segment in segments)
        mine = np.where((of == of[-1])[:, None], padded, 0)
        np.testing.assert_array_equal(held[0], mine[count : count + 3])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="parity needs torch: pip install 'jaxrl_llm[bench]'")
def test_values_and_gradients_are_those_of_transformers():
    """Three chunks of 64 tokens from a state, and the recurrent form."""
    import torch
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    arrays, state = drawn(150, rows=2), np.random.default_rng(1).standard_normal((2, HEADS, KEY, VALUE))
    state, ones = state.astype(np.float32), np.ones((2, 150), np.int32)
    weights = np.random.default_rng(2).standard_normal((2, 150, HEADS, VALUE)).astype(np.float32)
    tensors = [torch.tensor(x, requires_grad=True) for x in (*arrays, state)]
    for of in (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule):
        q, *rest, before = tensors
        out, last = of(q * KEY**0.5, *rest, initial_state=before, output_final_state=True)
        found, held = chunked(arrays, ones, state, 64)
        np.testing.assert_allclose(found, out.detach(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(held, last.detach(), rtol=1e-5, atol=1e-5)
        expected = torch.autograd.grad((out * torch.tensor(weights)).sum() + (last**2).sum(), tensors)

        def loss(arrays, state):
            out, held = chunked(arrays, ones, state, 64)
            return jnp.sum(out * weights) + jnp.sum(held**2)

        for mine, his in zip(jax.tree.leaves(jax.grad(loss, (0, 1))(arrays, state)), expected, strict=True):
            np.testing.assert_allclose(mine, his, rtol=1e-5, atol=2e-5)
