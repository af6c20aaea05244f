"""Attention of an exact forward on a TPU: a Pallas kernel that reads the columns which a token sees in their order,
wherever its segment begins in the row.

A program has some queries of one row and all columns of a head. It passes over the columns once for each segment of its
queries; to the queries of the other segments they are hidden, and a block that is hidden changes no bit. So a token's
result is the one that it has in a cache, alone in its row.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_llm.ground.array_typing import Array, Float, Integer
from jaxrl_llm.models.exact.tiles import HIDDEN

_QUERIES = 16  # tokens of a program


def attend_columns(
    q: Float[Array, "n h d"],
    keys: Float[Array, "b kv s d"],
    values: Float[Array, "b kv s d"],
    first: Integer[Array, "b t"] | None,
    shared: Integer[Array, "b t"] | None,
    count: Integer[Array, "b t"],
    *,
    width: int,
    interpret: bool,
) -> Float[Array, "n x"]:
    """`Tiles.attend`; width: columns of a block."""
    (b, kv, s, d), dtype, t = keys.shape, keys.dtype, count.shape[1]
    anywhere, prompts = first is not None, shared is not None
    group, fill = q.shape[1] // kv, -t % _QUERIES
    if anywhere:  # a block begins at any column, where a kernel reads numbers of 32 bits alone
        keys, values = (a.astype(jnp.float32) for a in (keys, values))
    if behind := width if anywhere else -s % width:
        keys, values = (jnp.pad(a, ((0, 0), (0, 0), (0, behind), (0, 0))) for a in (keys, values))
    seen = [jnp.zeros_like(count) if a is None else a for a in (first, shared, count)]
    seen = [jnp.pad(a, ((0, 0), (0, fill))) for a in seen]
    passes = _passes(*(a.reshape(b, -1, _QUERIES) for a in seen), width)
    by_head = jnp.pad(q.reshape(b, t, kv, group, d), ((0, 0), (0, fill), (0, 0), (0, 0), (0, 0))).swapaxes(1, 2)
    by_head = by_head.reshape(b, kv, -1, d)  # queries of a token side by side

    def kernel(passes: Any, q: Any, first: Any, shared: Any, count: Any, keys: Any, values: Any, out: Any) -> None:
        queries = q[0, 0] * d**-0.5

        def dot(x: Array, y: Array, axis: int) -> Array:
            """Sum over the last axis of x and this one of y."""
            sums, highest = (((1,), (axis,)), ((), ())), jax.lax.Precision.HIGHEST
            return jax.lax.dot_general(x, y, sums, precision=highest, preferred_element_type=jnp.float32)

        def of_segment(number: Array, carry: Any) -> Any:
            start, prompt, blocks = (passes[0, 0, place, number] for place in range(3))
            limit = jnp.where((first[0] == start) & (shared[0] == prompt), count[0], 0)

            def near(ref: Any, at: Array) -> Array:
                here = ref[0, 0, pl.ds(at + start if anywhere else at, width)].astype(jnp.float32)
                if not prompts:
                    return here
                column = at + jax.lax.broadcasted_iota(jnp.int32, here.shape, 0)
                return jnp.where(column < prompt, ref[0, 0, pl.ds(at, width)], here)

            def turn(block: Array, carry: Any) -> Any:
                top, total, out = carry
                at = pl.multiple_of(block * width, width)
                scores = dot(queries, near(keys, at), 1)
                hidden = at + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1) >= limit
                most = jnp.maximum(top, jnp.max(jnp.where(hidden, HIDDEN, scores), axis=-1, keepdims=True))
                weights, kept = jnp.where(hidden, 0, jnp.exp(scores - most)), jnp.exp(top - most)
                total = total * kept + jnp.sum(weights, axis=-1, keepdims=True)
                return most, total, out * kept + dot(weights, near(values, at), 0)

            return jax.lax.fori_loop(0, blocks, turn, carry)

        rows = len(queries)
        start = jnp.full((rows, 1), HIDDEN), jnp.zeros((rows, 1)), jnp.zeros(queries.shape)
        _, total, result = jax.lax.fori_loop(0, _QUERIES, of_segment, start)
        total = jnp.where(total == 0, 1, total)  # 0: of a row that fills the block
        out[0, 0] = (result / total).astype(dtype).astype(jnp.float32)

    of_token = pl.BlockSpec((1, _QUERIES * group, 1), lambda row, head, block: (row, block, 0))
    of_query = pl.BlockSpec((1, 1, _QUERIES * group, d), lambda row, head, block: (row, head, block, 0))
    of_head = pl.BlockSpec((1, 1, *keys.shape[2:]), lambda row, head, block: (row, head, 0, 0))
    scalars = pl.BlockSpec((1, 1, 3, _QUERIES), lambda row, head, block: (row, block, 0, 0), memory_space=pltpu.SMEM)
    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(by_head.shape, jnp.float32),
        grid=(b, kv, passes.shape[1]),
        in_specs=[scalars, of_query, of_token, of_token, of_token, of_head, of_head],
        out_specs=of_query,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=48 * 2**20
        ),
        interpret=interpret,
    )(passes, by_head, *(jnp.repeat(a, group, axis=1)[:, :, None] for a in seen), keys, values)
    return out.reshape(b, kv, -1, group, d)[:, :, :t].swapaxes(1, 2).reshape(b * t, -1)


def _passes(
    first: Integer[Array, "b p q"], shared: Integer[Array, "b p q"], count: Integer[Array, "b p q"], width: int
) -> Integer[Array, "b p 3 q"]:
    """For each query of a program its `first`, its `shared`, and the blocks of its segment; 0 if an earlier query of
    the program is of the same segment."""
    same = (first[..., :, None] == first[..., None, :]) & (shared[..., :, None] == shared[..., None, :])
    again = jnp.any(jnp.tril(same, -1), axis=-1)
    most = jnp.max(jnp.where(same, count[..., None, :], 0), axis=-1)
    return jnp.stack([first, shared, jnp.where(again, 0, -(-most // width))], axis=-2).astype(jnp.int32)
