"""Elements of arrays of a rollout, [b t], [b t x] and [l b t x], by flat places in its rows and time."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array
from jaxrl_llm.models import no_record
from jaxrl_llm.training.layout import Layout


def take(tree: Any, layout: Layout, micro: Any) -> Any:
    """The places of one micro-batch (or of all, micro = slice(None)) out of arrays [b t], [b t x] and [l b t x].

    Padding is 0, False, -1 in [b t x] or "no record".
    """
    index = layout.index[micro]
    return jax.tree.map(lambda x: picked(x, index, blank(x, index.shape)), tree)


def put(into: Any, new: Any, layout: Layout, micro: Any) -> Any:
    """Write the places of one micro-batch back into arrays [b t] and [l b t x] of the rollout."""
    index = layout.index[micro]
    return jax.tree.map(lambda old, new: written(old, new, index), into, new)


def picked(part: Array, index: Any, old: Array) -> Array:
    """`old`, where `index` is in range the elements of `part` there."""
    size = size_of(part)
    here, place = (index >= 0) & (index < size), jnp.clip(index, 0, size - 1)
    if part.ndim == 2:
        return jnp.where(here, part.ravel()[place], old)
    if part.ndim == 3:
        return jnp.where(here[..., None], part.reshape(size, -1)[place], old)
    flat = part.reshape(part.shape[0], size, part.shape[-1])
    return jnp.where(here[None, ..., None], flat[:, place], old)


def written(old: Array, new: Array, index: Any) -> Array:
    """`old` with the elements of `new` where `index` is in range."""
    size, new = size_of(old), new.astype(old.dtype)
    place = jnp.where((index >= 0) & (index < size), index, size).ravel()  # beyond the end, and dropped
    if old.ndim == 2:
        return old.ravel().at[place].set(new.ravel(), mode="drop").reshape(old.shape)
    flat, new = (x.reshape(x.shape[0], -1, x.shape[-1]) for x in (old, new))
    return flat.at[:, place].set(new, mode="drop").reshape(old.shape)


def blank(x: Array, shape: tuple[int, ...]) -> Array:
    """An array that is laid out, all padding."""
    if x.ndim == 2:
        return jnp.zeros(shape, x.dtype)
    if x.ndim == 3:
        return jnp.full((*shape, x.shape[-1]), -1, x.dtype)
    empty = no_record(x) if jnp.issubdtype(x.dtype, jnp.integer) else 0
    return jnp.full((x.shape[0], *shape, x.shape[-1]), empty, x.dtype)


def size_of(x: Array) -> int:
    """Places of an array [b t], [b t x] or [l b t x]."""
    return x.shape[1] * x.shape[2] if x.ndim == 4 else x.shape[0] * x.shape[1]
