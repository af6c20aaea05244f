"""Masked reductions equal the reductions of what is left, and never read what is masked."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.ground.masking import masked_mean, segment_sum

MASKS = st.lists(st.booleans(), min_size=12, max_size=12).map(lambda xs: np.asarray(xs).reshape(3, 4))
X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


@given(MASKS, st.sampled_from([None, 0, 1]))
def test_means_of_what_is_left(mask, axis):
    dirty = jnp.where(jnp.asarray(mask), X, jnp.nan)
    kept = np.where(mask, X, 0)
    mean = kept.sum(axis) / np.maximum(mask.sum(axis), 1)
    np.testing.assert_allclose(masked_mean(dirty, jnp.asarray(mask), axis), mean, rtol=1e-5, atol=1e-6)


@given(MASKS)
def test_segments(mask):
    ids = np.asarray([[0, 0, 1, 1], [1, 3, 3, 3], [4, 4, 4, 9]])  # 2 is empty, 9 lies outside and is dropped
    dirty = jnp.where(jnp.asarray(mask), X, jnp.inf)
    members = [X[mask & (ids == s)] for s in range(5)]
    got = segment_sum(dirty, jnp.asarray(mask), jnp.asarray(ids), 5)
    np.testing.assert_allclose(got, [m.sum() for m in members], rtol=1e-5, atol=1e-6)


def test_an_empty_mean_has_a_finite_gradient():
    nothing, x = jnp.zeros(3, bool), jnp.asarray([1.0, jnp.inf, jnp.nan])
    value, gradient = jax.value_and_grad(masked_mean)(x, nothing)
    assert value == 0
    np.testing.assert_array_equal(gradient, [0, 0, 0])
