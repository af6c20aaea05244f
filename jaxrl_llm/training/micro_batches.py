"""A minibatch as its `Layout` cuts it: micro-batches out of arrays of a rollout, results written back, sums over them.

On one device micro-batches are cut out of the rollout one after the other (indexing.py), on a mesh all at once
(exchange.py).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.precision import wide
from jaxrl_llm.training.indexing import blank, put, take
from jaxrl_llm.training.layout import Layout

_ON_A_MESH = ByName({"bring": "jaxrl_llm.training.exchange", "bring_back": "jaxrl_llm.training.exchange"})


def cut(arrays: Any, layout: Layout, mesh: Any) -> Callable[[Any], Any]:
    """Cut a tree of arrays of a rollout into micro-batches.

    Args:
      arrays: [b t], [b t x] and [l b t x].

    Returns:
      A function of the number of a micro-batch that gives its arrays, [rows time] in place of [b t]; slice(None) gives
      all micro-batches, [micro-batches rows time].
    """
    if not _spread(arrays, layout, mesh):
        return functools.partial(take, arrays, layout)
    leaves, structure = jax.tree.flatten(arrays)
    brought = _ON_A_MESH["bring"](leaves, layout.index, mesh)
    return lambda micro: structure.unflatten([x[:, micro] if x.ndim == 5 else x[micro] for x in brought])


def fill(into: Any, of: Callable[[Array], Any], layout: Layout, mesh: Any) -> Any:
    """Put results of micro-batches back into arrays of the rollout.

    Args:
      into: a tree of arrays [b t] and [l b t x].
      of: number of a micro-batch -> the same tree with [rows time] in place of [b t].

    Returns:
      `into` with of(i) in the places of every micro-batch i that is in use.
    """
    if not _spread(into, layout, mesh):
        return lax.fori_loop(0, layout.used, lambda i, into: put(into, of(i), layout, i), into)
    arrays, structure = jax.tree.flatten(into)

    def body(i: Array, filled: list[Array]) -> list[Array]:
        return [
            lax.dynamic_update_index_in_dim(old, new.astype(old.dtype), i, 0 if old.ndim == 3 else 1)
            for old, new in zip(filled, jax.tree.leaves(of(i)), strict=True)
        ]

    filled = lax.fori_loop(0, layout.used, body, [blank(x, layout.index.shape) for x in arrays])
    return structure.unflatten(_ON_A_MESH["bring_back"](arrays, filled, layout.index, mesh))


def accumulate(one: Callable[[Any], Any], layout: Layout) -> Any:
    """(totals, metrics, gradients), summed over the micro-batches in use; gradients in float32.

    Args:
      one: number of a micro-batch -> ((loss, (totals, metrics)), gradients).
    """
    if len(layout.index) == 1:
        (_, (totals, metrics)), gradients = one(0)
        return totals, metrics, jax.tree.map(wide, gradients)
    (_, (totals, metrics)), gradients = jax.eval_shape(one, 0)
    gradients = jax.eval_shape(functools.partial(jax.tree.map, wide), gradients)
    zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
    add = functools.partial(jax.tree.map, jnp.add)

    def body(i: Array, carry: Any) -> Any:
        (_, (totals, metrics)), gradients = one(i)
        return add(carry[0], totals), M.combine(carry[1], metrics), add(carry[2], gradients)

    return lax.fori_loop(0, layout.used, body, (zeros(totals), M.identity(metrics), zeros(gradients)))


def padded(layout: Layout, multiple: int) -> Layout:
    """Rows with as much padding as makes their length a multiple of this."""
    room = ((0, 0), (0, 0), (0, -layout.index.shape[2] % multiple))
    index = jnp.pad(layout.index, room, constant_values=-1)
    return layout.replace(index=index, segment_ids=jnp.pad(layout.segment_ids, room))


def _spread(tree: Any, layout: Layout, mesh: Mesh | None) -> bool:
    """Return whether devices have places of their own: they divide rows of the rollout, and rows and time of every
    micro-batch."""
    rows = {x.shape[1 if x.ndim == 4 else 0] for x in jax.tree.leaves(tree)}
    cut = [(n, "rows") for n in rows] + list(zip(layout.index.shape[1:], sharding.MICRO_BATCH, strict=True))
    return sharding.shards("rows", mesh) > 1 and not any(n % sharding.shards(axis, mesh) for n, axis in cut)
