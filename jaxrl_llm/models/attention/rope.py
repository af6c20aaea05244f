"""Rotary position embedding (RoFormer, arXiv 2104.09864), half-split, optionally with the frequencies of Llama 3."""

import math

import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float, Integer

__all__ = ["rotate", "rotation"]


def rotation(
    positions: Integer[Array, "b t"], head_dim: int, theta: float, scaling: tuple[float, ...] = ()
) -> tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]:
    """cos and sin of position * theta^(-2i/d), i < d/2, shared by all heads and layers; `scaling` as in `_scaled`."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    frequency = _scaled(frequency, *scaling) if scaling else frequency
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency[None, None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def _scaled(frequency: Array, factor: float, low: float, high: float, original: float) -> Array:
    """Llama 3's longer context (arXiv 2407.21783): with n = original * frequency / 2 pi turns over the original length,

    frequency / factor for n < low,   frequency for n > high,   and a mixture, linear in n, in between.
    """
    kept = jnp.clip((original * frequency / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / factor


def rotate(
    x: Float[Array, "b t h d"], rope: tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]
) -> Float[Array, "b t h d"]:
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), computed in float32."""
    cos, sin = rope
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
