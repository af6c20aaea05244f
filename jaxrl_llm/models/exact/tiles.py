"""Arithmetic of an exact forward on a CPU: XLA's kernels at a fixed number of rows, so that every program multiplies
[ROWS, d] by [d, f], however many rows there are.

XLA picks a kernel, and with it an order of summation, by the number of rows. Of a fixed number it picks one, in which
the result of a row depends neither on its place in the tile nor on the other rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float, Integer
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.experts.expert_blocks import of_slots
from jaxrl_llm.models.layers import LowRank, whole
from jaxrl_llm.models.softmax import log_softmax

ROWS = 32  # another number gives other bits
HIDDEN = -1e30  # the score of a column that is not seen; finite, so that no difference is NaN


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The operations that an exact forward is made of; a platform with kernels of its own overrides them.

    A part of a layer is a function of rows that `in_tiles` calls. All its arithmetic on rows is done by the other
    methods.
    """

    columns: ClassVar[int] = 32  # of a block of keys

    @classmethod
    def of(cls, config: ModelConfig) -> "Tiles":
        """Raises ValueError: a size of the model has no kernel."""
        del config
        return cls()

    def in_tiles(self, function: Callable[..., Any], *rows: Any) -> Any:
        """function(*rows), called for some rows at a time; every array of `rows` and of the result has rows first."""
        return in_tiles(function, *rows)

    def without_kernel(self, function: Callable[..., Any], *rows: Any) -> Any:
        """function(*rows) inside of `in_tiles`, for what is no kernel on any platform."""
        return function(*rows)

    def by_row(self, function: Callable[..., Any], rows: tuple[Array, ...], *others: Array) -> Any:
        """function(*rows, *others) inside of `in_tiles`; it computes each row by itself."""
        return function(*rows, *others)

    def product(self, x: Float[Array, "n d"], weight: Float[Array, "d f"], dtype: Any) -> Float[Array, "n f"]:
        """x W inside of `in_tiles`, summed in float32 and rounded to `dtype`."""
        return self.rounded(x @ weight, dtype)

    def held(self, weight: Array, dtype: Any) -> Array:
        """The weight as `product` takes it, in a type that holds the numbers of `dtype`."""
        return self.rounded(weight, dtype)

    def rounded(self, x: Array, dtype: Any) -> Array:
        """x as float32 numbers that `dtype` has.

        A conversion to bfloat16 and back may be compiled to nothing, this is not; and small products in bfloat16 take
        XLA:CPU several times as long as those of float32.
        """
        x = x.astype(jnp.float32)
        return x if jnp.dtype(dtype) == jnp.float32 else jax.lax.reduce_precision(x, 8, 7)

    def log_softmax(
        self, logits: Float[Array, "n v"], of_target: Float[Array, "n"]
    ) -> tuple[Float[Array, "n"], Float[Array, "n"], Float[Array, "n"]]:
        """log p of the tokens with these logits, entropy and log of the partition sum, inside of `in_tiles`."""
        return log_softmax(logits, of_target)[:3]

    def experts(
        self, x: Float[Array, "n d"], experts: Integer[Array, "n k"], weights: tuple[Array, ...], dtype: Any
    ) -> Float[Array, "n k d"]:
        """The output of each expert of a token."""
        del dtype  # activations stay float32
        return of_slots(x, experts, weights, ROWS)

    def attend(
        self,
        q: Float[Array, "n h d"],
        keys: Float[Array, "b kv s d"],
        values: Float[Array, "b kv s d"],
        first: Integer[Array, "b t"] | None,
        shared: Integer[Array, "b t"] | None,
        count: Integer[Array, "b t"],
        window: Integer[Array, "b t"] | None = None,
        sinks: Float[Array, " h"] | None = None,
    ) -> Float[Array, "n x"]:
        """softmax(q k^T / sqrt(d)) v over the columns that each of b t queries sees.

        The p-th of its `count` columns is p if p is below `shared`, and otherwise p + first; None stands for 0. It sees
        the last `window` of them, and a sink of its head as one score more.
        Online softmax (FlashAttention, arXiv 2205.14135, algorithm 1); a block that is hidden changes no bit.
        """
        kv, length, scale = keys.shape[1], keys.shape[2], q.shape[-1] ** -0.5

        def of_tile(q: Array, row: Array, first: Any, shared: Any, count: Array, window: Any) -> Array:
            q = (q * scale).reshape(len(q), kv, -1, q.shape[-1])
            before = 0 if window is None else jnp.maximum(count - window, 0)[:, None]

            def turn(block: Array, carry: Any) -> Any:
                top, total, out = carry
                column = at = before + block * self.columns + jnp.arange(self.columns)[None]
                if first is not None:
                    column = at + first[:, None]
                if shared is not None:
                    column = jnp.where(at < shared[:, None], at, column)
                column = jnp.clip(jnp.broadcast_to(column, (len(q), self.columns)), 0, length - 1)
                near = (a[row[:, None], :, column].astype(jnp.float32) for a in (keys, values))
                keys_here, values_here = jax.lax.optimization_barrier(tuple(near))
                scores = jnp.einsum("rkgd,rckd->rkgc", q, keys_here)
                hidden = (at >= count[:, None])[:, None, None]
                most = jnp.maximum(top, jnp.max(jnp.where(hidden, HIDDEN, scores), axis=-1, keepdims=True))
                weights = jnp.where(hidden, 0, jnp.exp(scores - most))
                kept = jnp.exp(top - most)
                new = jnp.einsum("rkgc,rckd->rkgd", weights, values_here)
                return most, total * kept + jnp.sum(weights, axis=-1, keepdims=True), out * kept + new

            start = jnp.full((*q.shape[:3], 1), HIDDEN), jnp.zeros((*q.shape[:3], 1)), jnp.zeros(q.shape)
            if sinks is not None:
                start = jnp.broadcast_to(sinks.reshape(1, kv, -1, 1), start[0].shape), start[1] + 1, start[2]
            most = count if window is None else jnp.minimum(count, window)
            _, total, out = jax.lax.fori_loop(0, -(-jnp.max(most) // self.columns), turn, start)
            total = jnp.where(total == 0, 1, total)  # 0: of a row that fills a tile
            return self.rounded(out / total, keys.dtype).reshape(len(q), -1)

        row = jnp.broadcast_to(jnp.arange(len(keys))[:, None], count.shape)
        return self.in_tiles(of_tile, q, *jax.tree.map(jnp.ravel, (row, first, shared, count, window)))


def in_tiles(function: Callable[..., Any], *rows: Any, size: int = 0) -> Any:
    """function(*rows), called for `size` rows at a time (0: ROWS); the last ones are filled with zeros."""
    size, count = size or ROWS, len(jax.tree.leaves(rows)[0])

    def cut(x: Array) -> Array:
        padded = jnp.pad(x, [(0, -count % size)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, size, *x.shape[1:])

    def of_tile(tile: Any) -> Any:
        # What stands before and behind a tile is no part of its kernels.
        return jax.lax.optimization_barrier(function(*jax.lax.optimization_barrier(tile)))

    out = jax.lax.map(of_tile, jax.tree.map(cut, rows))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], out)


def in_order(weight: Any) -> Array:
    """`layers.whole` with a sum over the rank in its order: a matrix that is cut over devices has the same numbers."""
    if not isinstance(weight, LowRank):
        return whole(weight)

    def add(place: Array, total: Array) -> Array:
        return total + weight.a[..., place, None] * weight.b[..., None, place, :]

    total = jax.lax.fori_loop(0, weight.a.shape[-1], add, weight.weight.astype(jnp.float32))
    return total.astype(weight.weight.dtype)


def on_rows(
    function: Callable[..., Any], mesh: Mesh | None, axis: str, rows: tuple[Any, ...], others: Any, places: Any = None
) -> Any:
    """function(others, *rows) on each device's rows, whose logical axis is `axis`; places: of the others on the mesh;
    None: whole on every device.

    A sum that is cut over devices is another sum.
    """
    if mesh is None or mesh.size == 1:
        return function(others, *rows)
    count = len(jax.tree.leaves(rows)[0])
    place = sharding.spec((axis,), (count,), mesh)
    given = places or PartitionSpec(), *[place] * len(rows)
    return jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=place, check_vma=False)(others, *rows)
