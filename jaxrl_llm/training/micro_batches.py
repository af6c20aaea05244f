"""What a `Layout` does to arrays: cut micro-batches out of a rollout, write their results back, sum over them.

On a mesh the rows of a rollout stay on their devices, and so do the places of a micro-batch: once a minibatch every
device is sent what its places need (training/exchange.py), and then cuts micro-batches out of what it has. One device
cuts them out of the rollout, one after the other.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.array_typing import Array
from jaxrl_llm.ground.sharding import MICRO_BATCH, shards
from jaxrl_llm.models import no_record
from jaxrl_llm.training.exchange import bring, bring_back
from jaxrl_llm.training.layout import Layout

__all__ = ["accumulate", "cut", "fill", "put", "take"]


def cut(tree: Any, layout: Layout, mesh: Any) -> Callable[[Any], Any]:
    """A function from the number of a micro-batch (or slice(None), all) to its places out of arrays, as `take`."""
    if not _spread(tree, layout, mesh):
        return functools.partial(take, tree, layout)
    arrays, structure = jax.tree.flatten(tree)
    there = bring(arrays, jnp.asarray(layout.index), mesh)

    def of(micro: Any) -> Any:
        return jax.tree.unflatten(structure, [x[micro] if x.ndim == 3 else x[:, micro] for x in there])

    return of


def fill(into: Any, of: Callable[[Any], Any], layout: Layout, mesh: Any) -> Any:
    """Arrays of the rollout with of(i) in the places of every micro-batch i in use, as `put`."""
    if not _spread(into, layout, mesh):
        return jax.lax.fori_loop(0, layout.used, lambda i, into: put(into, of(i), layout, i), into)

    arrays, structure = jax.tree.flatten(into)

    def blank(x: Array) -> Array:
        shape = layout.index.shape
        return jnp.zeros(shape if x.ndim == 2 else (x.shape[0], *shape, x.shape[-1]), x.dtype)

    def set_one(filled: Array, new: Array, i: Any) -> Array:
        return jax.lax.dynamic_update_index_in_dim(filled, new.astype(filled.dtype), i, 0 if filled.ndim == 3 else 1)

    def body(i: Array, filled: list[Array]) -> list[Array]:
        return [set_one(old, new, i) for old, new in zip(filled, jax.tree.leaves(of(i)), strict=True)]

    filled = jax.lax.fori_loop(0, layout.used, body, [blank(x) for x in arrays])
    return jax.tree.unflatten(structure, bring_back(arrays, filled, jnp.asarray(layout.index), mesh))


def _spread(tree: Any, layout: Layout, mesh: Any) -> bool:
    """Whether the devices have places of their own: they divide the rows of the rollout, and rows and time of every
    micro-batch."""
    rows = {x.shape[0 if x.ndim == 2 else 1] for x in jax.tree.leaves(tree)}
    cut = [(n, "rows") for n in rows] + list(zip(layout.index.shape[1:], MICRO_BATCH, strict=True))
    return shards("rows", mesh) > 1 and not any(n % shards(axis, mesh) for n, axis in cut)


def take(tree: Any, layout: Layout, micro: Any) -> Any:
    """The places of one micro-batch (or of all, micro = slice(None)) out of arrays [b t] and [l b t x].

    Padding is 0, False or "no record".
    """
    index = layout.index[micro]

    def one(x: Array) -> Array:
        if x.ndim == 2:
            return jnp.where(index >= 0, x.ravel()[jnp.maximum(index, 0)], jnp.zeros((), x.dtype))
        flat = x.reshape(x.shape[0], -1, x.shape[-1])[:, jnp.maximum(index, 0)]
        empty = no_record(x) if jnp.issubdtype(x.dtype, jnp.integer) else 0
        return jnp.where((index >= 0)[None, ..., None], flat, jnp.asarray(empty, x.dtype))

    return jax.tree.map(one, tree)


def put(into: Any, new: Any, layout: Layout, micro: Any) -> Any:
    """Write the places of one micro-batch back into arrays [b t] and [l b t x] of the rollout."""
    index = layout.index[micro]

    def one(old: Array, new: Array) -> Array:
        size = old.shape[0] * old.shape[1] if old.ndim == 2 else old.shape[1] * old.shape[2]
        place = jnp.where(index >= 0, index, size).ravel()  # padding is dropped
        if old.ndim == 2:
            return old.ravel().at[place].set(new.ravel().astype(old.dtype), mode="drop").reshape(old.shape)
        flat = old.reshape(old.shape[0], size, old.shape[-1])
        new = new.reshape(new.shape[0], -1, new.shape[-1]).astype(old.dtype)
        return flat.at[:, place].set(new, mode="drop").reshape(old.shape)

    return jax.tree.map(one, into, new)


def accumulate(one: Callable[[Any], Any], layout: Layout) -> Any:
    """Totals, metrics and gradients summed over the micro-batches in use; with a single one nothing is added.

    Args:
      one: micro-batch -> ((loss, (totals, metrics)), gradients).
    """
    if len(layout.index) == 1:
        (_, (totals, metrics)), gradients = one(0)
        return totals, metrics, gradients
    (_, (totals, metrics)), gradients = jax.eval_shape(one, 0)
    zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
    add = functools.partial(jax.tree.map, jnp.add)

    def body(i: Array, carry: Any) -> Any:
        (_, (totals, metrics)), gradients = one(i)
        return add(carry[0], totals), M.combine(carry[1], metrics), add(carry[2], gradients)

    return jax.lax.fori_loop(0, layout.used, body, (zeros(totals), M.identity(metrics), zeros(gradients)))
