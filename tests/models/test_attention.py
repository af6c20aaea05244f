"""Attention over a batch and over a cache, and the norm, against loops."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import attend_blocks, choice
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


def _shared_row(prompt, answers, length, padding):
    """What a row of answers to one prompt sees, the padding at its end nothing."""
    ids = np.repeat(np.arange(1, answers + 2), [prompt, *[length] * answers])
    ids = np.concatenate([ids, np.zeros(padding, int)])
    same = (ids[:, None] == ids[None]) | (ids == 1)[None]
    return np.tril(same & (ids != 0)[None])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_blocks_that_no_query_sees_are_left_out_and_change_nothing(dtype):
    """Two rows, whose answers end at other places, neither a whole number of blocks long; output and gradients."""
    rng = np.random.default_rng(0)
    rows = [_shared_row(90, 3, 100, 20), _shared_row(30, 2, 150, 80)]
    visible = jnp.asarray(np.stack(rows))
    shapes = [(2, 410, 4, 8), (2, 2, 410, 8), (2, 2, 410, 8)]
    given = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    weight = jnp.asarray(rng.standard_normal(shapes[0]), jnp.float32) * jnp.any(visible, axis=2)[:, :, None, None]

    def loss(attention, *given):
        return jnp.sum(attention(*given, visible).astype(jnp.float32) * weight)

    (of_blocks, blocks), (of_rows, whole) = (
        jax.jit(jax.value_and_grad(lambda *given, f=f: loss(f, *given), argnums=(0, 1, 2)))(*given)
        for f in (attend_blocks.attend_blocks, attend_causal)
    )
    tolerance = 3e-5 if dtype == np.float32 else 0.03
    np.testing.assert_allclose(of_blocks, of_rows, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(blocks, whole, strict=True):
        assert ours.dtype == dtype
        chex.assert_trees_all_close(ours, theirs, rtol=tolerance, atol=tolerance * np.abs(np.asarray(theirs)).max())


def test_a_block_that_no_query_sees_is_not_read():
    """Keys of a hidden block that are not numbers would spoil every sum that they enter."""
    visible = jnp.asarray(_shared_row(64, 2, 64, 0)[None])
    keys = jnp.ones((1, 1, 192, 8)).at[:, :, 64:128].set(jnp.nan)
    out = attend_blocks.attend_blocks(jnp.ones((1, 192, 1, 8)), keys, jnp.ones((1, 1, 192, 8)), visible)
    assert np.isnan(np.asarray(out[0, 64:128])).all()
    np.testing.assert_allclose(out[0, 128:], 1.0)


@pytest.mark.parametrize(("cores", "time", "taken"), [(2, 512, True), (2, 511, False), (3, 512, False)])
def test_blocks_are_left_out_of_long_rows_on_few_cores(monkeypatch, cores, time, taken):
    monkeypatch.setattr(choice.machine, "usable_cores", lambda: list(range(cores)))
    assert choice.skips_blocks(time, None) == taken
