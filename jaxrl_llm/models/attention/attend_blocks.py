"""Attention in blocks of queries and columns that leaves out blocks in which no query sees a column, in plain JAX.

Of a long row that answers to one prompt share, most pairs of tokens are hidden: every answer sees the prompt and
itself. No array holds a whole row of scores (FlashAttention, arXiv 2205.14135, algorithm 1; its backward, algorithm 4).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.ground.array_typing import Array, Bool, Float
from jaxrl_llm.models.attention.attend import MASKED, by_key_head, by_query_head

BLOCK = 64  # queries, and columns, of a block


@jax.custom_vjp
def attend_blocks(
    queries: Float[Array, "b t h d"],
    keys: Float[Array, "b kv t d"],
    values: Float[Array, "b kv t d"],
    visible: Bool[Array, "b t t"],
) -> Float[Array, "b t h d"]:
    """softmax(q k^T / sqrt(d)) v over the visible columns, of which none is later than its query; scores, softmax and
    sums in float32."""
    return _forward(queries, keys, values, visible)[0]


class _Blocks:
    """Arrays padded to whole blocks; seen [n n]: whether a query of block i sees a column of block j in any row."""

    def __init__(self, queries: Array, keys: Array, values: Array, visible: Array):
        self.shape, self.room = queries.shape, -queries.shape[1] % BLOCK
        self.kv = keys.shape[1]
        self.queries = self.of_queries(queries * queries.shape[-1] ** -0.5)
        self.keys, self.values = self._padded(keys, 2), self._padded(values, 2)
        self.visible = self._padded(visible, 1, 2)
        self.count = self.visible.shape[1] // BLOCK
        of_blocks = self.visible.reshape(-1, self.count, BLOCK, self.count, BLOCK)
        self.seen = jnp.any(of_blocks, axis=(0, 2, 4))

    def of_queries(self, x: Array) -> Array:
        """[b t h d] -> [b kv h/kv t d]."""
        b, t, h, d = x.shape
        return self._padded(by_key_head(x, self.kv).reshape(b, self.kv, h // self.kv, t, d), 3)

    def joined(self, blocks: Array) -> Array:
        """Blocks of queries [n b kv h/kv BLOCK d] -> [b t h d]."""
        b, t, h, d = self.shape
        x = jnp.moveaxis(blocks, 0, 3).reshape(b, self.kv, h // self.kv, -1, d)[:, :, :, :t]
        return by_query_head(x.reshape(b, self.kv, -1, d), self.shape)

    def scores(self, queries: Array, keys: Array, i: Array, j: Array) -> Array:
        visible = _cut(_cut(self.visible, i, 1), j, 2)
        return jnp.where(visible[:, None, None], _dot("bkgqd,bksd->bkgqs", queries, keys), MASKED)

    def over_columns(self, i: Array, step: Callable[[Array, Any], Any], carry: Any) -> Any:
        """step(j, carry) for every block of columns that block i of queries sees."""

        def one(j: Array, carry: Any) -> Any:
            return lax.cond(self.seen[i, j], functools.partial(step, j), lambda carry: carry, carry)

        return lax.fori_loop(0, i + 1, one, carry)

    def _padded(self, x: Array, *axes: int) -> Array:
        return jnp.pad(x, [(0, self.room if axis in axes else 0) for axis in range(x.ndim)])


_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _cut(x: Array, block: Array, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, block * BLOCK, BLOCK, axis)


def _forward(queries: Array, keys: Array, values: Array, visible: Array) -> tuple[Array, Any]:
    """The output, and what the backward needs: it as blocks, with the logarithm of every query's sum of weights."""
    all_ = _Blocks(queries, keys, values, visible)

    def chunk(i: Array) -> tuple[Array, Array]:
        q = _cut(all_.queries, i, 3)

        def step(j: Array, carry: Any) -> Any:
            top, total, out = carry
            scores = all_.scores(q, _cut(all_.keys, j, 2), i, j)
            higher = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights, kept = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
            v = _cut(all_.values, j, 2)
            out = out * kept[..., None] + _dot("bkgqs,bksd->bkgqd", weights.astype(v.dtype), v)
            return higher, total * kept + jnp.sum(weights, axis=-1), out

        start = jnp.full(q.shape[:-1], MASKED), jnp.zeros(q.shape[:-1]), jnp.zeros(q.shape)
        top, total, out = all_.over_columns(i, step, start)
        total = jnp.where(total == 0, 1, total)  # no block was seen
        return out / total[..., None], top + jnp.log(total)

    out, partition = lax.map(chunk, jnp.arange(all_.count))
    return all_.joined(out).astype(queries.dtype), (queries, keys, values, visible, out, partition)


def _backward(residuals: Any, cotangent: Array) -> tuple[Array, Array, Array, None]:
    """Backward of `attend`, block by block: dq of a block of queries, dk and dv added up over those blocks."""
    queries, keys, values, visible, *of_blocks = residuals
    all_ = _Blocks(queries, keys, values, visible)
    cotangent = all_.of_queries(cotangent)

    def chunk(grown: Any, given: Any) -> tuple[Any, Array]:
        i, out, partition = given
        q, do = _cut(all_.queries, i, 3), _cut(cotangent, i, 3)
        along = jnp.sum(do.astype(jnp.float32) * out, axis=-1, keepdims=True)

        def step(j: Array, carry: Any) -> Any:
            dq, dk, dv = carry
            k, v = _cut(all_.keys, j, 2), _cut(all_.values, j, 2)
            weights = jnp.exp(all_.scores(q, k, i, j) - partition[..., None])
            ds = (weights * (_dot("bkgqd,bksd->bkgqs", do, v) - along)).astype(k.dtype)
            dk = _added(dk, _dot("bkgqs,bkgqd->bksd", ds, q), j)
            dv = _added(dv, _dot("bkgqs,bkgqd->bksd", weights.astype(v.dtype), do), j)
            return dq + _dot("bkgqs,bksd->bkgqd", ds, k), dk, dv

        dq, *grown = all_.over_columns(i, step, (jnp.zeros(q.shape), *grown))
        return tuple(grown), dq

    zeros = tuple(jnp.zeros(x.shape) for x in (all_.keys, all_.values))
    (dk, dv), dq = lax.scan(chunk, zeros, (jnp.arange(all_.count), *of_blocks))
    dq = all_.joined(dq) * queries.shape[-1] ** -0.5
    time = queries.shape[1]
    return dq.astype(queries.dtype), dk[:, :, :time].astype(keys.dtype), dv[:, :, :time].astype(values.dtype), None


def _added(x: Array, change: Array, block: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(x, _cut(x, block, 2) + change, block * BLOCK, 2)


attend_blocks.defvjp(_forward, _backward)
