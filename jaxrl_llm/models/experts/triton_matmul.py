"""Grouped matmul on GPUs: two Pallas kernels in Triton; the first serves the forward and the gradient of the rows.

multiply     out_i = rows_i @ weights_e, or @ weights_e^T     one program per (tile of rows, block of columns)
accumulate   d weights_e = sum of rows_i^T cotangent_i        one program per (group, block of weights_e)

With many rows a group the forward of a Hopper GPU takes the kernel of tokamax where that is installed
(`mosaic_matmul.py`).

Rows are sorted by group, and a tile lies inside one: a schedule made on the device names each tile's group and rows,
with room for every way of cutting m rows into groups, so that nothing waits for the host.

Source: MegaBlocks, arXiv 2211.15841.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxrl_llm.ground.array_typing import Array, Float, Int
from jaxrl_llm.models.experts import mosaic_matmul

# By bytes of an operand: the sides of a program's block of the result, the places of the summed axis that it takes at a
# time, warps and stages. For bfloat16 what tokamax's tables record as best on an H100: a forward of 393216 rows, 128
# groups, 2048 x 768 in 3.41 ms, 363 TFLOP/s; the gradient of such matrices by 131072 rows in 0.747 ms, 552 TFLOP/s.
# Those for float32 take less shared memory.
_MULTIPLY = {2: ((128, 128), 32, 4, 4), 4: ((64, 64), 32, 4, 3)}
_ACCUMULATE = {2: ((128, 256), 64, 8, 3), 4: ((64, 64), 32, 4, 3)}
_SMALLEST = 16  # side of a block that a tensor core takes


class Tiles(NamedTuple):
    """For each tile its group, its first row, and where the rows of its group end. A tile of no rows ends at 0."""

    group: Array
    start: Array
    stop: Array


def tiles_of(counts: Int[Array, "e"], rows: int, size: int) -> Tiles:
    """Tiles of at most `size` rows that cover the groups one after the other."""
    stops, tiles = jnp.cumsum(counts), -(-counts // size)
    used = jnp.cumsum(tiles)
    most = (rows + min(len(counts), rows) * (size - 1)) // size  # beyond its whole tiles a group has at most one
    index = jnp.arange(most, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(index[:, None] >= used[None], axis=1, dtype=jnp.int32), len(counts) - 1)
    start = (stops - counts)[group] + (index - (used - tiles)[group]) * size
    live = index < used[-1]
    return Tiles(group, jnp.where(live, start, 0), jnp.where(live, stops[group], 0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul_gpu(
    rows: Float[Array, "m d"], weights: Float[Array, "e d f"], counts: Int[Array, "e"], interpret: bool = False
) -> Float[Array, "m f"]:
    """rows_i @ weights_e, e the group of row i, summed in float32 and given in the type of the rows; undefined past the
    last group.

    rows, sorted by group, have the weights' dtype; float32 is rounded to TF32 unless jax_default_matmul_precision says
    otherwise, as in every other product on a GPU. interpret: run the kernels as plain JAX, on any platform.
    """
    return _multiply(rows, weights, counts, transposed=False, interpret=interpret)


def _fwd(rows: Array, weights: Array, counts: Array, interpret: bool) -> tuple[Array, tuple[Array, ...]]:
    return grouped_matmul_gpu(rows, weights, counts, interpret), (rows, weights, counts)


def _bwd(interpret: bool, residuals: tuple[Array, ...], cotangent: Array) -> tuple[Array, Array, None]:
    rows, weights, counts = residuals
    d_rows = _multiply(cotangent, weights, counts, transposed=True, interpret=interpret)
    return d_rows, _accumulate(rows, cotangent, counts, weights.dtype, interpret), None


grouped_matmul_gpu.defvjp(_fwd, _bwd)


def _multiply(rows: Array, weights: Array, counts: Array, transposed: bool, interpret: bool) -> Array:
    """rows_i [m d] @ weights_e [e d f], or @ weights_e^T [e f d] if transposed, summed in float32."""
    if not (interpret or transposed) and mosaic_matmul.fits(rows, weights):
        return mosaic_matmul.multiply(rows, weights, counts)
    m, d = rows.shape
    f = weights.shape[1 if transposed else 2]
    (tile, columns), inner, warps, stages = _MULTIPLY[rows.dtype.itemsize]
    tile, columns, inner = _side(-(-m // len(counts)), tile), _side(f, columns), _side(d, inner)
    tiles, blocks = tiles_of(counts, m, tile), -(-f // columns)

    def grouped_multiply(rows: Any, weights: Any, group: Any, start: Any, stop: Any, out: Any) -> None:
        i, block = lax.div(pl.program_id(0), blocks), lax.rem(pl.program_id(0), blocks)
        here, across = _Span(start[i], tile, stop[i]), _Span(block * columns, columns, f)
        g = group[i]

        def step(j: Array, total: Array) -> Array:
            along = _Span(j * inner, inner, d)
            a = _load(rows, here, along)
            b = _load(weights, across, along, g).T if transposed else _load(weights, along, across, g)
            return total + triton.dot(a, b)

        @pl.when(start[i] < stop[i])
        def _() -> None:
            total = lax.fori_loop(0, -(-d // inner), step, jnp.zeros((tile, columns), jnp.float32))
            place = out.at[pl.ds(here.start, tile), pl.ds(across.start, columns)]
            triton.store(place, total.astype(out.dtype), mask=_mask(here, across))

    return pl.pallas_call(
        grouped_multiply,
        out_shape=jax.ShapeDtypeStruct((m, f), rows.dtype),
        grid=(len(tiles.group) * blocks,),  # the blocks of a tile run side by side and share its rows
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
    )(rows, weights, *tiles)


def _accumulate(rows: Array, cotangent: Array, counts: Array, dtype: Any, interpret: bool) -> Array:
    """rows_e^T @ cotangent_e [e d f] for every group, summed in float32; rows are [m d], cotangents [m f]."""
    d, f = rows.shape[1], cotangent.shape[1]
    (down, columns), inner, warps, stages = _ACCUMULATE[rows.dtype.itemsize]
    down, columns = _side(d, down), _side(f, columns)
    stops = jnp.cumsum(counts)

    def grouped_accumulate(rows: Any, cotangent: Any, starts: Any, stops: Any, out: Any) -> None:
        group = pl.program_id(2)
        start, stop = starts[group], stops[group]
        left, right = _Span(pl.program_id(1) * down, down, d), _Span(pl.program_id(0) * columns, columns, f)

        def step(j: Array, total: Array) -> Array:
            along = _Span(start + j * inner, inner, stop)
            a, b = _load(rows, along, left), _load(cotangent, along, right)
            return total + triton.dot(a.T, b)

        total = lax.fori_loop(0, pl.cdiv(stop - start, inner), step, jnp.zeros((down, columns), jnp.float32))
        place = out.at[group, pl.ds(left.start, down), pl.ds(right.start, columns)]
        triton.store(place, total.astype(out.dtype), mask=_mask(left, right))

    return pl.pallas_call(
        grouped_accumulate,
        out_shape=jax.ShapeDtypeStruct((len(counts), d, f), dtype),
        grid=(-(-f // columns), -(-d // down), len(counts)),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
    )(rows, cotangent, stops - counts, stops)


class _Span(NamedTuple):
    """`size` places from `start` on; places from `stop` on do not count."""

    start: Any
    size: int
    stop: Any

    @property
    def whole(self) -> bool:
        """Return whether all places count wherever the span starts, because its size divides the array."""
        return isinstance(self.stop, int) and self.stop % self.size == 0


def _mask(first: _Span, second: _Span) -> Array | None:
    masks = [None if s.whole else s.start + jnp.arange(s.size) < s.stop for s in (first, second)]
    parts = [m[:, None] if i == 0 else m[None] for i, m in enumerate(masks) if m is not None]
    shape = first.size, second.size
    return functools.reduce(jnp.logical_and, (jnp.broadcast_to(p, shape) for p in parts)) if parts else None


def _load(ref: Any, first: _Span, second: _Span, *group: Array) -> Array:
    """A block, with 0 at places that do not count."""
    mask = _mask(first, second)
    block = ref.at[*group, pl.ds(first.start, first.size), pl.ds(second.start, second.size)]
    return triton.load(block, mask=mask, other=None if mask is None else 0.0)


def _side(size: int, most: int) -> int:
    """The power of two that holds `size`, between what a tensor core takes and `most`."""
    return min(most, max(_SMALLEST, pl.next_power_of_2(size)))
