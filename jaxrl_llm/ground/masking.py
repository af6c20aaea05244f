"""Masked reductions, and the widths to which padding is cut.

The mask enters as `where=`, so an excluded element may be inf or NaN.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, Shaped

Axis = int | tuple[int, ...] | None


def masked_mean(x: Float[Array, "*any"], where: Bool[Array, "*any"], axis: Axis = None) -> Array:
    """Mean of x over the elements where `where` holds; 0, with a finite gradient, where none does."""
    count = jnp.sum(where, axis=axis)
    return jnp.sum(x, axis=axis, where=where) / jnp.maximum(count, 1)


def segment_sum(
    x: Shaped[Array, "b t"], where: Bool[Array, "b t"], segment: Integer[Array, "b t"], num_segments: int
) -> Shaped[Array, "s"]:
    """Sum of x per segment over the elements where `where` holds: [b t] -> [num_segments]."""
    flat = jnp.where(where, x, jnp.zeros((), x.dtype)).ravel()
    return jax.ops.segment_sum(flat, segment.ravel(), num_segments)


def bucket(longest: int, time: int, buckets: int) -> int:
    """The smallest of `buckets` equal divisions of `time` that holds the longest row; each compiles once."""
    step = -(-time // buckets)
    return min(time, -(-max(longest, 1) // step) * step)
