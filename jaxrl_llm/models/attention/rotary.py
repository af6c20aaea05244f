"""Rotary positions (RoPE, arXiv 2104.09864)."""

import dataclasses

import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float, Integer
from jaxrl_llm.ground.by_name import ByName

_OF_SOME = ByName(
    {
        "rotate_pairs": "jaxrl_llm.models.attention.rope_scaling",
        "scaled_frequencies": "jaxrl_llm.models.attention.rope_scaling",
    }
)
Rotation = tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]


@dataclasses.dataclass(frozen=True)
class Rope:
    """Frequencies theta^(-2i/size), i < size/2, for the first `size` numbers of a head.

    scaling: the numbers of its kind (`rope_scaling.FIELDS`); (): none.
    """

    size: int
    theta: float
    scaling: tuple[float, ...] = ()
    kind: str = "llama3"


def rotation(positions: Integer[Array, "b t"], rope: Rope) -> Rotation:
    """cos and sin of position * frequency, shared by all heads."""
    frequency, factor = rope.theta ** (-jnp.arange(0, rope.size, 2, dtype=jnp.float32) / rope.size), 1.0
    if rope.scaling:
        frequency, factor = _OF_SOME["scaled_frequencies"](rope.kind, rope.scaling, frequency, rope.theta)
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return (cos, sin) if factor == 1 else (factor * cos, factor * sin)


def rotate(x: Float[Array, "b t h d"], turned: Rotation, pairs: bool = False) -> Float[Array, "b t h d"]:
    """(x1, x2, rest) -> (x1 cos - x2 sin, x2 cos + x1 sin, rest), computed in float32; x1 and x2 are as wide as cos.

    pairs: x1 and x2 alternate.
    """
    cos, sin = turned
    half = cos.shape[-1]
    if pairs:
        return _OF_SOME["rotate_pairs"](x, cos, sin)
    cuts = 2 if x.shape[-1] == 2 * half else (half, 2 * half)
    x1, x2, *rest = jnp.split(x.astype(jnp.float32), cuts, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, *rest], axis=-1).astype(x.dtype)
