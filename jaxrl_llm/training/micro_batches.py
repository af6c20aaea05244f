"""What a `Layout` does to arrays: cut micro-batches out of a rollout, write their results back, sum over them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import metrics as M
from jaxrl_llm.array_typing import Array
from jaxrl_llm.models.routing import no_record
from jaxrl_llm.training.layout import Layout

__all__ = ["accumulate", "put", "take"]


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
