"""Causal attention inside a segment by `attend`, which test_attention.py holds to a loop: what kernels must equal."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.attention.attend import attend


def plain(queries, keys, values, segment_ids):
    return attend(queries, keys, values, jnp.tril(segment_ids[:, :, None] == segment_ids[:, None, :]))


def value_and_gradients(attention, problem):
    """Of sum(attention * weight); problem = (queries, keys, values, segment_ids, weight)."""
    *tensors, segment_ids, weight = problem
    loss = lambda q, k, v: jnp.sum(attention(q, k, v, segment_ids) * weight)  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*tensors)


def assert_close(found, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), found, expected)
