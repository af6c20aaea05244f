"""A weight with a low-rank change beside it, W + A B, used in place of a plain weight."""

from typing import Any

import flax.struct
import jax

from jaxrl_llm.ground.array_typing import Array, Float

__all__ = ["LowRank", "project", "whole"]


class LowRank(flax.struct.PyTreeNode):
    """weight [*lead m n], a [*lead m r], b [*lead r n]; the scale is part of a. Indexes and casts as a weight does."""

    weight: Float[Array, "*lead m n"]
    a: Float[Array, "*lead m r"]
    b: Float[Array, "*lead r n"]

    def __getitem__(self, index: Any) -> "LowRank":
        return jax.tree.map(lambda x: x[index], self)

    def astype(self, dtype: Any) -> "LowRank":
        return jax.tree.map(lambda x: x.astype(dtype), self)


def project(x: Float[Array, "*batch m"], weight: Any) -> Float[Array, "*batch n"]:
    """x W, or x W + (x A) B: where W is frozen its gradient, a third of a step's FLOPs, is never computed."""
    if isinstance(weight, LowRank):
        weight = weight.astype(x.dtype)
        return x @ weight.weight + (x @ weight.a) @ weight.b
    return x @ weight.astype(x.dtype)


def whole(weight: Any) -> Float[Array, "*shape"]:
    """W, or W + A B in the type of W: for experts and the router, which take whole matrices."""
    if not isinstance(weight, LowRank):
        return weight
    return (weight.weight + weight.a @ weight.b).astype(weight.weight.dtype)
