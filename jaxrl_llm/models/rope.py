"""Rotary position embedding (RoFormer, arXiv 2104.09864), half-split as in Qwen3."""

import jax.numpy as jnp

from jaxrl_llm.array_typing import Array, Float, Integer

__all__ = ["rotate", "rotation"]


def rotation(
    positions: Integer[Array, "b t"], head_dim: int, theta: float
) -> tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]:
    """cos and sin of position * theta^(-2i/d), i < d/2, shared by all heads and layers."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency[None, None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "b t h d"], rope: tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]
) -> Float[Array, "b t h d"]:
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), computed in float32."""
    cos, sin = rope
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
