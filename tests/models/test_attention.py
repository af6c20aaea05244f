"""Attention over a batch and over a cache, and the norm, against loops."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention.attend import attend, attend_causal
from jaxrl_llm.models.layers import RMSNorm
from tests.reference import transformer_numpy


def _problem(kv, dtype=np.float32):
    rng = np.random.default_rng(kv)
    queries = rng.standard_normal((2, 5, 4, 8)).astype(np.float32)
    keys, values = rng.standard_normal((2, 2, kv, 6, 8)).astype(np.float32)
    visible = rng.random((2, 5, 6)) < 0.6
    visible[:, :, 0] = True
    return jnp.asarray(queries, dtype), jnp.asarray(keys, dtype), jnp.asarray(values, dtype), jnp.asarray(visible)


def _loop(queries, keys, values, visible):
    queries, keys, values = (np.asarray(x, np.float64) for x in (queries, keys, values))
    out = np.zeros(queries.shape)
    for b, t, h in np.ndindex(queries.shape[:3]):
        kv = h // (queries.shape[2] // keys.shape[1])
        seen = np.flatnonzero(visible[b, t])
        weights = transformer_numpy.softmax(keys[b, kv, seen] @ queries[b, t, h] / np.sqrt(queries.shape[3]))
        out[b, t, h] = weights @ values[b, kv, seen]
    return out


@pytest.mark.parametrize("kv", [1, 2, 4])
def test_equals_the_loop(kv):
    problem = _problem(kv)
    np.testing.assert_allclose(jax.jit(attend)(*problem), _loop(*problem), rtol=1e-5, atol=1e-6)


def test_bfloat16_scores_are_float32():
    """Against float64 arithmetic on the same rounded inputs; what remains is the rounding of weights and output."""
    problem = _problem(2, jnp.bfloat16)
    out = jax.jit(attend)(*problem)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), _loop(*problem), atol=4 * 2**-8)


def test_a_row_that_sees_nothing_is_finite_and_its_gradient_too():
    queries, keys, values, visible = _problem(2)
    visible = visible.at[0, 3].set(False)
    total = jax.value_and_grad(lambda q, k: jnp.sum(attend(q, k, values, visible)), argnums=(0, 1))
    out, grads = jax.jit(total)(queries, keys)
    assert np.isfinite(out)
    assert all(np.all(np.isfinite(g)) for g in grads)


def test_what_is_not_seen_has_no_gradient():
    queries, keys, values, visible = _problem(4)
    visible = visible.at[:, :, 5].set(False)
    total = jax.grad(lambda k, v: jnp.sum(jnp.square(attend(queries, k, v, visible))), argnums=(0, 1))
    grads = jax.jit(total)(keys, values)
    for grad in grads:
        assert not np.any(grad[:, :, 5])
        assert np.all(np.abs(grad[:, :, 0]).max(axis=-1) > 0)


def test_rms_norm_golden(tiny):
    """(3, 4): mean square 12.5, so x / 3.5355 times the scale (2, 1)."""
    norm = RMSNorm(2, tiny(rms_norm_eps=1e-12).config)
    norm.scale[...] = jnp.array([2.0, 1.0])
    expected = np.array([[6 / 12.5**0.5, 4 / 12.5**0.5]])
    np.testing.assert_allclose(norm(jnp.array([[3.0, 4.0]])), expected, rtol=1e-6)
    low = norm(jnp.array([[3.0, 4.0]], jnp.bfloat16))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_array_equal(low, jnp.asarray(expected, jnp.bfloat16))  # one rounding, at the end


def test_chunks_of_queries_change_nothing():
    """130 tokens: three chunks, the last of two; packed segments and padding included."""
    rng = np.random.default_rng(5)
    shape = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)  # noqa: E731
    queries, keys, values = shape(2, 130, 4, 8), shape(2, 2, 130, 8), shape(2, 2, 130, 8)
    segments = jnp.asarray(np.repeat([[1, 2, 0]], 2, axis=0).repeat([70, 50, 10], axis=1))
    visible = jnp.tril(segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, None]
    weight = shape(2, 130, 4, 8) * (segments != 0)[:, :, None, None]
    both = [
        jax.jit(jax.value_and_grad(lambda *x, f=f: jnp.sum(f(*x, visible) * weight), argnums=(0, 1, 2)))(
            queries, keys, values
        )
        for f in (attend, attend_causal)
    ]
    chex.assert_trees_all_close(*both, rtol=1e-5, atol=1e-5)
