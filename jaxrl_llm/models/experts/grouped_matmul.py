"""Rows sorted by group times each group's matrix; on a TPU or GPU by a kernel that computes only these products.

TPU  megablox (jax.experimental.pallas); for the gradient of the matrices `jax.lax.ragged_dot` of jax 0.10 multiplies
     every row by every group
GPU  two Triton kernels (`triton_matmul.py`), on Hopper one of tokamax forward (`mosaic_matmul.py`);
     `jax.lax.ragged_dot` is dense over all groups both ways
CPU  `jax.lax.ragged_dot`, dense too: a reference, since a CPU runs its experts in blocks (`expert_blocks.py`)

Source of the kernels: MegaBlocks, arXiv 2211.15841.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from jaxrl_llm.ground.array_typing import Array, Float, Int
from jaxrl_llm.models.experts.triton_matmul import grouped_matmul_gpu
from jaxrl_llm.models.layers import OfLayer, whole

_LANES, _LARGEST = 128, 1024  # the sides of a TPU's tiles are multiples of the first and at most the second
_LARGEST_ROWS = 512


def grouped_matmul(
    rows: Float[Array, "m d"], weights: Float[Array, "e d f"] | OfLayer, counts: Int[Array, "e"], platform: str
) -> Float[Array, "m f"]:
    """rows_i @ weights_e, e the group of row i, summed in float32 and given in the type of the rows. Rows are sorted by
    group; past the first sum(counts) they belong to none: result and gradient are undefined there, and no other place
    depends on what they hold."""
    if isinstance(weights, OfLayer):
        if platform == "tpu":
            return _in_stack(rows, weights, counts)
        weights = whole(weights)
    if platform == "tpu":
        return _by_tiles(rows, weights, counts, False)  # pyright: ignore
    if platform == "gpu":
        return grouped_matmul_gpu(rows, weights, counts, False)  # pyright: ignore
    return jax.lax.ragged_dot(rows, weights, counts, preferred_element_type=jnp.float32).astype(rows.dtype)


def _in_stack(rows: Array, weights: OfLayer, counts: Array, interpret: bool = False) -> Array:
    """`_by_tiles` of one layer, whose groups begin so many matrices behind the first of all layers: none is copied for
    the kernel. It has no gradient."""
    layers, groups, d, f = weights.stack.shape
    padded, every = _whole_tiles(rows, groups), weights.stack.reshape(-1, d, f)
    first, tiles = -groups * weights.layer, _tiles(len(padded), groups, d, f)
    with jax.named_scope(f"one_of_{layers}_layers"):  # what a plan counts
        return gmm(padded, every, counts, rows.dtype, tiles, group_offset=first, interpret=interpret)[: len(rows)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _by_tiles(rows: Array, weights: Array, counts: Array, interpret: bool) -> Array:
    """Megablox; interpret: run it as plain JAX. Its own gradient is not in the operands' precision, the one here is."""
    padded = _whole_tiles(rows, len(counts))
    tiles = _tiles(len(padded), len(counts), *weights.shape[1:])
    return gmm(padded, weights, counts, rows.dtype, tiles, interpret=interpret)[: len(rows)]


def _by_tiles_fwd(rows: Array, weights: Array, counts: Array, interpret: bool) -> tuple[Array, tuple[Array, ...]]:
    return _by_tiles(rows, weights, counts, interpret), (rows, weights, counts)


def _by_tiles_bwd(interpret: bool, residuals: tuple[Array, ...], cotangent: Array) -> tuple[Array, Array, None]:
    """d rows = cotangent @ weights_e^T, d weights_e = rows_e^T @ cotangent_e."""
    rows, weights, counts = residuals
    groups, d, f = weights.shape
    padded, cotangent = (_whole_tiles(x, groups) for x in (rows, cotangent))
    m = len(padded)
    to_rows, to_weights = _tiles(m, groups, f, d), _tiles(m, groups, d, f)
    d_rows = gmm(cotangent, weights, counts, rows.dtype, to_rows, transpose_rhs=True, interpret=interpret)
    d_weights = tgmm(padded.swapaxes(0, 1), cotangent, counts, weights.dtype, to_weights, interpret=interpret)
    return d_rows[: len(rows)], d_weights, None


_by_tiles.defvjp(_by_tiles_fwd, _by_tiles_bwd)


def _row_tile(m: int, groups: int) -> int:
    """A power of two near the mean load: a group's last tile is computed whole."""
    return min(_LARGEST_ROWS, max(_LANES, pl.next_power_of_2(max(1, m // groups))))


def _whole_tiles(rows: Array, groups: int) -> Array:
    return jnp.pad(rows, ((0, -len(rows) % _row_tile(len(rows), groups)), (0, 0)))


def _tiles(m: int, groups: int, contracted: int, columns: int) -> tuple[int, int, int]:
    return _row_tile(m, groups), _side(contracted), _side(columns)


def _side(size: int) -> int:
    """The largest multiple of a TPU's lanes that divides the size; where none does, the size or a common tile."""
    fits = [t for t in range(_LANES, min(size, _LARGEST) + 1, _LANES) if size % t == 0]
    return max(fits, default=min(size, _LARGEST // 2))
