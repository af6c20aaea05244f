"""Keys and values of the tokens fed so far, head-major so that a decode step reads them in order.

Keys are stored transposed, [b kv d s]: both products of attention then run along their last axis, which on a CPU is
five times faster for q k^T than a transposed operand that has to be repacked at every step. A long cache is cut into
stretches of columns, arrays of their own, so that attention can leave out those that no row has reached; a slice of one
array would be copied before it is multiplied. On a GPU, which would wait for the host at each condition, it is one
array, and a kernel reads each row as far as it is filled (`flash_decode.py`).

The token at position p of a row is in column p (behind a prefix: p minus the prompt's length). A query sees the columns
up to its own, so columns left over from padding or from an earlier answer are never read. If the answers of a group
stay in adjacent rows, their prompt is a prefix: columns before the cache that are stored and read once per group.
"""

import importlib.util
import itertools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer
from jaxrl_llm.models.architecture import ModelConfig

_SHORTEST = 64  # columns of a stretch


class Layout(NamedTuple):
    """How a cache lies in memory."""

    key_columns: int  # the axis of keys that tells columns, 3: [b kv d s], or 2: [b kv s d], as values
    stretches: int  # at most so many
    multiple: int = 1  # of which its length is one


KERNEL = "jax.experimental.pallas.ops.gpu.decode_attention"
STRETCHES, WHOLE, FILLED = Layout(3, 8), Layout(3, 1), Layout(2, 1, 256)


def layout_of(config: ModelConfig, platform: str) -> Layout:
    """FILLED where the kernel of `flash_decode.py` runs: in bfloat16 on a GPU, if this JAX still has it, unless plain
    attention is asked for."""
    if platform != "gpu":
        return STRETCHES
    fits = config.dtype == "bfloat16" and config.head_dim in (16, 32, 64, 128) and importlib.util.find_spec(KERNEL)
    return FILLED if fits and config.attention_implementation != "plain" else WHOLE


Keys = tuple[Float[Array, "_ kv _ _"], ...]  # the stretches of one layer; those of a prefix have fewer rows
Values = tuple[Float[Array, "_ kv _ head"], ...]


class Prefix(flax.struct.PyTreeNode):
    """Prompts before a cache: prompt i belongs to rows i b / p to (i + 1) b / p - 1."""

    keys: tuple[Keys, ...]
    values: tuple[Values, ...]
    lengths: Integer[Array, "p"]


class KVCache(flax.struct.PyTreeNode):
    """The stretches of each layer; a tuple, not a stack, so that a decode step updates each layer in place."""

    keys: tuple[Keys, ...]
    values: tuple[Values, ...]
    prefix: Prefix | None = None


def empty(config: ModelConfig, rows: int, length: int, layout: Layout = STRETCHES) -> KVCache:
    b, kv, d = rows, config.num_key_value_heads, config.head_dim
    length += -length % layout.multiple
    size = max(_SHORTEST, -(-length // layout.stretches))
    sizes = [min(size, length - start) for start in range(0, length, size)]
    dtype, layers = config.compute_dtype, config.kinds
    across = slice(None, None, 1 if layout.key_columns == 3 else -1)
    return KVCache(
        keys=tuple(tuple(jnp.zeros((b, kv, *(d, n)[across]), dtype) for n in sizes) for _ in layers),
        values=tuple(tuple(jnp.zeros((b, kv, n, d), dtype) for n in sizes) for _ in layers),
    )


class LayerCache(NamedTuple):
    """One layer, the column from which each row's tokens are written, and the prefix's stretches."""

    keys: Keys
    values: Values
    column: Integer[Array, "b"]
    prefix: tuple[Keys, Values]


def by_layer(cache: KVCache, positions: Integer[Array, "b t"]) -> tuple[list[LayerCache], Bool[Array, "b t s"]]:
    """Every layer for tokens at these positions, and the columns that each token sees, those of the prefix first."""
    prefix, visible = cache.prefix, []
    if prefix is not None:
        lengths = jnp.repeat(prefix.lengths, len(positions) // len(prefix.lengths))[:, None]
        positions, width = positions - lengths, starts(prefix.values[0])[-1]
        visible = [jnp.broadcast_to((jnp.arange(width)[None] < lengths)[:, None], (*positions.shape, width))]
    visible.append(jnp.arange(starts(cache.values[0])[-1])[None, None] <= positions[:, :, None])
    shared = [((), ())] * len(cache.keys) if prefix is None else zip(prefix.keys, prefix.values, strict=True)
    layers = zip(cache.keys, cache.values, shared, strict=True)
    return [LayerCache(k, v, positions[:, 0], p) for k, v, p in layers], jnp.concatenate(visible, axis=-1)


def starts(values: Values) -> list[int]:
    """The first column of each stretch, and the length of all together."""
    return list(itertools.accumulate((stretch.shape[2] for stretch in values), initial=0))


def write(
    keys: Keys,
    values: Values,
    new_keys: Float[Array, "b t kv d"],
    new_values: Float[Array, "b t kv d"],
    column: Integer[Array, "b"],
    layout: Layout = STRETCHES,
) -> tuple[Keys, Values]:
    """Write t consecutive columns of every row of one layer, from that row's own `column` on."""
    b, t = new_keys.shape[:2]
    rows, columns = jnp.arange(b)[:, None], column[:, None] + jnp.arange(t)[None]

    def put(stretches: tuple[Array, ...], new: Array, axis: int) -> tuple[Array, ...]:
        out = []
        for stretch, start in zip(stretches, starts(values), strict=False):
            # Where a stretch does not hold the column, an index past its end drops the update.
            local = jnp.where(columns < start, stretch.shape[axis], columns - start)
            place = stretch.at[rows, :, local] if axis == 2 else stretch.at[rows, :, :, local]
            out.append(place.set(new.astype(stretch.dtype), mode="drop"))
        return tuple(out)

    return put(keys, new_keys, layout.key_columns), put(values, new_values, 2)


def copy_rows(
    cache: KVCache,
    into: Integer[Array, "n"],
    source: KVCache,
    rows: Integer[Array, "n"],
    width: int,
    layout: Layout = STRETCHES,
) -> KVCache:
    """The first `width` columns of `rows` of `source` become those of the rows `into`; one past the end is dropped."""

    def copy(old: tuple[Array, ...], new: tuple[Array, ...], axis: int) -> tuple[Array, ...]:
        given, start, out = jnp.concatenate([stretch[rows] for stretch in new], axis=axis), 0, []
        for stretch in old:
            end = min(start + stretch.shape[axis], width)
            if end > start:
                part = jax.lax.slice_in_dim(given, start, end, axis=axis)
                place = stretch.at[into, :, : end - start] if axis == 2 else stretch.at[into, :, :, : end - start]
                stretch = place.set(part, mode="drop")
            out.append(stretch)
            start += stretch.shape[axis]
        return tuple(out)

    return cache.replace(
        keys=tuple(copy(old, new, layout.key_columns) for old, new in zip(cache.keys, source.keys, strict=True)),
        values=tuple(copy(old, new, 2) for old, new in zip(cache.values, source.values, strict=True)),
    )
