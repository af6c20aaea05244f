"""RoPE: a golden rotation, and the property that it exists for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.models.attention.rotary import Rope, rotate, rotation


@jax.jit
def _rotate(x, position):
    return rotate(x.reshape(1, 1, 1, -1), rotation(position.reshape(1, 1), Rope(x.size, 100.0))).reshape(-1)


def _at(x, position):
    """One head at one position; theta = 100."""
    return np.asarray(_rotate(np.asarray(x, np.float32), np.asarray(position)))


def test_golden_rotation():
    """d = 4, theta = 100: pair (0, 2) turns by p, pair (1, 3) by p * 100^(-1/2) = p / 10."""
    c, s, fine_c, fine_s = np.cos(3), np.sin(3), np.cos(0.3), np.sin(0.3)
    np.testing.assert_allclose(_at([1, 2, 0, 0], 3), [c, 2 * fine_c, s, 2 * fine_s], rtol=1e-6)
    np.testing.assert_allclose(_at([0, 0, 1, 2], 3), [-s, -2 * fine_s, c, 2 * fine_c], rtol=1e-6)


def test_position_zero_is_the_identity():
    x = np.arange(4.0) - 2
    np.testing.assert_array_equal(_at(x, 0), x)


@given(p=st.integers(0, 500), q=st.integers(0, 500), shift=st.integers(0, 500))
def test_a_product_depends_on_the_distance_only(p, q, shift):
    x, y = np.random.default_rng(0).standard_normal((2, 4))
    product = lambda a, b: float(_at(x, a) @ _at(y, b))  # noqa: E731
    assert product(p, q) == pytest.approx(product(p + shift, q + shift), abs=1e-3)
    assert product(p, p) == pytest.approx(float(x @ y), abs=1e-3)


def test_computed_in_float32_returned_in_the_type_given():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 1, 8)), jnp.bfloat16)
    rope = rotation(jnp.asarray(np.arange(6).reshape(2, 3) + 1000), Rope(8, 1e6))
    low = rotate(x, rope)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_array_equal(low, rotate(x.astype(jnp.float32), rope).astype(jnp.bfloat16))  # rounded once, last
