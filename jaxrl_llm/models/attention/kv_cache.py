"""Keys and values of the tokens fed so far, head-major so that a decode step reads them in order.

On a CPU keys are stored transposed, [b kv d s]: both products of attention then run along their last axis, which on a
CPU is five times faster for q k^T than a transposed operand that has to be repacked at every step. A long cache is cut
into stretches of columns, arrays of their own, so that attention can leave out those that no row has reached; a slice
of one array would be copied before it is multiplied. On a GPU, which would wait for the host at each condition, it is
one array, and a kernel reads each row as far as it is filled (`flash_decode.py`). In bfloat16 on a TPU equal layers
that follow each other are a stack: a step reads it in a loop over its layers, which compiles in a fifth of the time,
and writes to it once, behind the loop, whose turns would otherwise each copy it.

The token at position p of a row is in column p (behind a prefix: p minus the prompt's length). A query sees the columns
up to its own, so columns left over from padding or from an earlier answer are never read. If the answers of a group
stay in adjacent rows, their prompt is a prefix: columns before the cache that are stored and read once per group.
"""

import functools
import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer
from jaxrl_llm.models.architecture import DELTA, Kind, ModelConfig
from jaxrl_llm.models.layers import OfLayer

_SHORTEST = 64  # columns of a stretch


class Layout(NamedTuple):
    """How a cache lies in memory."""

    key_columns: int  # the axis of keys that tells columns, -1: [b kv d s], or -2: [b kv s d], as values
    stretches: int  # at most so many
    multiple: int = 1  # of which its length is one
    stacked: bool = False  # [l b kv s d] for l equal layers that follow each other


KERNEL = "jax.experimental.pallas.ops.gpu.decode_attention"
STRETCHES, WHOLE, FILLED, ROWS = Layout(-1, 8), Layout(-1, 1), Layout(-2, 1, 256), Layout(-2, 1)
STACKED = Layout(-2, 8, 128, stacked=True)  # eight stretches of whole tiles, which have 16 rows


def layout_of(config: ModelConfig, platform: str) -> Layout:
    """STACKED in bfloat16 on a TPU, but not beside states; in float32 XLA would convert whole stacks at every step.
    FILLED where the kernel of `flash_decode.py` runs: in bfloat16 on a GPU, if this JAX still has it, unless plain
    attention is asked for. ROWS for exact numerics, whose attention reads columns by position; on a TPU in whole
    blocks."""
    if config.numerics == "exact":
        return ROWS._replace(multiple=128) if platform == "tpu" else ROWS
    if platform == "tpu" and config.dtype == "bfloat16" and not config.linear_num_value_heads:
        return STACKED
    if platform != "gpu":
        return STRETCHES
    fits = config.dtype == "bfloat16" and config.head_dim in (16, 32, 64, 128) and importlib.util.find_spec(KERNEL)
    fits = fits and not (config.sliding_window or config.attention_sinks or config.kv_lora_rank)  # it knows none
    return FILLED if fits and config.attention_implementation != "plain" else WHOLE


# The stretches of one layer, or of a stack; those of a prefix have fewer rows.
Keys = tuple[Float[Array, "... _ kv _ _"], ...]
Values = tuple[Float[Array, "... _ kv _ _"], ...]


class Prefix(flax.struct.PyTreeNode):
    """Prompts before a cache: prompt i belongs to rows i b / p to (i + 1) b / p - 1."""

    keys: tuple[Keys, ...]
    values: tuple[Values, ...]
    lengths: Integer[Array, "p"]


class State(NamedTuple):
    """A layer of linear attention in a cache, in the place of its keys; it has no values."""

    window: Float[Array, "b 1 m c"]  # the last inputs of its convolution
    matrices: Float[Array, "b h k v"]  # float32


class KVCache(flax.struct.PyTreeNode):
    """The stretches of each of `groups`, or its `State`."""

    keys: tuple[Keys | State, ...]
    values: tuple[Values, ...]
    prefix: Prefix | None = None


def groups(config: ModelConfig, layout: Layout) -> list[tuple[Kind, range]]:
    """The layers of each array of a cache, in order: their kind, and their places among all layers of that kind."""
    if layout.stacked:
        return config.runs
    return [(kind, range(place, place + 1)) for kind, places in config.runs for place in places]


def empty(config: ModelConfig, rows: int, length: int, layout: Layout = STRETCHES) -> KVCache:
    config.check_length(length)
    b, (kv, d, v) = rows, config.cached
    length += -length % layout.multiple
    size = max(_SHORTEST, -(-length // layout.stretches))
    sizes = [min(size, length - start) for start in range(0, length, size)]
    of = [(kind, (len(places),) if layout.stacked else ()) for kind, places in groups(config, layout)]
    across = slice(None, None, 1 if layout.key_columns == -1 else -1)
    zeros = functools.partial(jnp.zeros, dtype=config.compute_dtype)
    return KVCache(
        keys=tuple(
            empty_state(config, b) if kind in DELTA else tuple(zeros((*lead, b, kv, *(d, n)[across])) for n in sizes)
            for kind, lead in of
        ),
        values=tuple(() if kind in DELTA else tuple(zeros((*lead, b, kv, n, v)) for n in sizes) for kind, lead in of),
    )


def empty_state(config: ModelConfig, rows: int) -> State:
    """Before the first token."""
    heads, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    inputs = 2 * config.linear_num_key_heads * key + heads * value
    window = jnp.zeros((rows, 1, config.linear_conv_kernel_dim - 1, inputs), config.compute_dtype)
    return State(window, jnp.zeros((rows, heads, key, value), jnp.float32))


class LayerCache(NamedTuple):
    """A layer or a stack, the column from which each row's tokens are written, and the prefix's stretches."""

    keys: Any  # Keys, or of one layer of a stack a tuple of OfLayer
    values: Any
    column: Integer[Array, "b"]
    prefix: tuple[Any, Any]

    def of_layer(self, layer: Integer[Array, ""]) -> "LayerCache":
        """One layer of a stack."""
        parts = self.keys, self.values, self.prefix
        keys, values, prefix = jax.tree.map(lambda stack: OfLayer(stack, layer), parts)
        return LayerCache(keys, values, self.column, prefix)


def by_group(
    cache: KVCache, positions: Integer[Array, "b t"], layout: Layout = STRETCHES
) -> tuple[list[LayerCache], Bool[Array, "b t s"]]:
    """Every layer or stack for tokens at these positions, and the columns that each token sees, those of the prefix
    first. Behind a stack come the tokens' own columns, which are not written yet when it is read."""
    prefix, visible = cache.prefix, []
    if prefix is not None:
        lengths = jnp.repeat(prefix.lengths, len(positions) // len(prefix.lengths))[:, None]
        positions, width = positions - lengths, starts(prefix.values[0])[-1]
        visible = [jnp.broadcast_to((jnp.arange(width)[None] < lengths)[:, None], (*positions.shape, width))]
    columns = jnp.arange(max(starts(values)[-1] for values in cache.values))[None, None]
    if layout.stacked:
        own = jnp.tril(jnp.ones((positions.shape[1],) * 2, bool))[None]
        written = columns < positions[:, :1, None]
        visible += [jnp.broadcast_to(part, (*positions.shape, part.shape[2])) for part in (written, own)]
    else:
        visible.append(columns <= positions[:, :, None])
    shared = [((), ())] * len(cache.keys) if prefix is None else zip(prefix.keys, prefix.values, strict=True)
    layers = zip(cache.keys, cache.values, shared, strict=True)
    return [LayerCache(k, v, positions[:, 0], p) for k, v, p in layers], jnp.concatenate(visible, axis=-1)


def of_prefill(keys: Float[Array, "b kv t d"], values: Float[Array, "b kv t v"], layout: Layout) -> tuple[Keys, Values]:
    """One layer's cache of the tokens of a prefill."""
    return (jnp.swapaxes(keys, 2, 3) if layout.key_columns == -1 else keys,), (values,)


def extended(
    cache: LayerCache, keys: Float[Array, "b t kv d"], values: Float[Array, "b t kv v"], layout: Layout
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Return one layer's cache with these columns, and every stretch of keys and of values that its attention reads. Of
    a stack the first is the columns alone, for `write_stack`, and they are the last stretch."""
    shared_keys, shared_values = cache.prefix
    if layout.stacked:
        own = jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2)
        return (keys, values), (*shared_keys, *cache.keys, own[0]), (*shared_values, *cache.values, own[1])
    kv = write(*cache[:2], keys, values, cache.column, layout)
    return kv, (*shared_keys, *kv[0]), (*shared_values, *kv[1])


def starts(values: Sequence[Any]) -> list[int]:
    """The first column of each stretch, and the length of all together."""
    return list(itertools.accumulate((stretch.shape[-2] for stretch in values), initial=0))


def write(
    keys: Keys,
    values: Values,
    new_keys: Float[Array, "b t kv d"],
    new_values: Float[Array, "b t kv v"],
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
            place = stretch.at[rows, :, local] if axis == -2 else stretch.at[rows, :, :, local]
            out.append(place.set(new.astype(stretch.dtype), mode="drop"))
        return tuple(out)

    return put(keys, new_keys, layout.key_columns), put(values, new_values, -2)


def write_stack(
    cache: LayerCache, new_keys: Float[Array, "l b t kv d"], new_values: Float[Array, "l b t kv v"], mesh: Mesh | None
) -> tuple[Keys, Values]:
    """`write` for a stack, on each device's rows and heads. Stretches that no row of the device reaches stay as they
    are. A piece of what is written is one vector: XLA:TPU would lay the layers of a longer one side by side, and copy
    the stack before and after."""

    def run(stretches: tuple[Array, ...], new: Array, columns: Array) -> tuple[Array, ...]:
        l, b, _, kv, _ = new.shape
        layer, row, head = jnp.arange(l)[:, None, None, None], jnp.arange(b)[:, None, None], jnp.arange(kv)

        def put(stretch: Array, start: int) -> Array:
            size = stretch.shape[-2]
            local = jnp.where(columns < start, size, columns - start)[:, :, None]
            return jax.lax.cond(
                jnp.any(local < size),
                lambda old: old.at[layer, row, head, local].set(new.astype(old.dtype), mode="drop"),
                lambda old: old,
                stretch,
            )

        return tuple(put(stretch, start) for stretch, start in zip(stretches, starts(stretches), strict=False))

    if mesh is not None and mesh.size > 1:
        spec = functools.partial(sharding.spec, mesh=mesh)
        old = spec((None, "rows", "kv_heads", None, None), cache.values[0].shape)
        new, rows = (
            spec((None, "rows", None, "kv_heads", None), new_keys.shape),
            spec(("rows", None), new_keys.shape[1:3]),
        )
        run = jax.shard_map(run, mesh=mesh, in_specs=(old, new, rows), out_specs=old, check_vma=False)
    columns = cache.column[:, None] + jnp.arange(new_keys.shape[2])[None]
    return run(cache.keys, new_keys, columns), run(cache.values, new_values, columns)


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
        if isinstance(old, State) or not old:
            return jax.tree.map(lambda x, y: x.at[into].set(y[rows], mode="drop"), old, new)
        given, start, out = jnp.concatenate([stretch[..., rows, :, :, :] for stretch in new], axis=axis), 0, []
        for stretch in old:
            end = min(start + stretch.shape[axis], width)
            if end > start:
                part = jax.lax.slice_in_dim(given, start, end, axis=axis)
                first = slice(end - start)
                place = stretch.at[..., into, :, first, :] if axis == -2 else stretch.at[..., into, :, :, first]
                stretch = place.set(part, mode="drop")
            out.append(stretch)
            start += stretch.shape[axis]
        return tuple(out)

    return cache.replace(
        keys=tuple(copy(old, new, layout.key_columns) for old, new in zip(cache.keys, source.keys, strict=True)),
        values=tuple(copy(old, new, -2) for old, new in zip(cache.values, source.values, strict=True)),
    )
