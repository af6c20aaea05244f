"""Rows times each group's matrix on a Hopper GPU by the kernel of the library tokamax, where its version is installed.

Measured on an H200 (jax 0.11.2, bfloat16, 393216 rows in 128 groups, wall time of a call): with the tiles below 4.27 ms
for matrices 2048 x 1536, where Triton takes 4.72, and 2.65 ms for 768 x 2048, where Triton takes 2.63. With those that
the tables of tokamax 0.0.17 record for such sizes (128 x 64, 128 summed at a time) it took 5.05 and 3.31 ms. With
matrices that are transposed for it, and so copied, it is behind, and so it was with 256 rows a group: the gradients of
rows and of matrices stay in `triton_matmul.py`.
"""

import functools
import importlib.metadata
from typing import Any

import jax.numpy as jnp
from jax.extend import backend

from jaxrl_llm.ground.array_typing import Array, Float, Int

VERSION = "0.0.17"  # the tiles below are an argument of a class that tokamax does not call public
_SIDE, _SUMMED = 128, 64  # of a block of the result, and places of the summed axis at a time, which divide the sides
_MANY = 3072  # rows of a group at an even load: so many were measured, and at 256 Triton was faster


def fits(rows: Array, weights: Array) -> bool:
    """Return whether the kernel is here, takes these arrays, and has many rows for each group at an even load."""
    (m, d), groups = rows.shape, len(weights)
    whole = m % 8 == 0 and d % _SUMMED == 0 and weights.shape[2] % _SIDE == 0 and m >= _MANY * groups
    return whole and rows.dtype == weights.dtype == jnp.bfloat16 and _on_hopper() and installed()


@functools.cache
def installed() -> bool:
    try:
        return importlib.metadata.version("tokamax") == VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


def _on_hopper() -> bool:
    """tokamax asks the default device for its architecture too. An accelerator that is only planned for is none."""
    device = backend.get_default_device()
    return device.platform == "gpu" and getattr(device, "compute_capability", "").startswith("9.")


def multiply(rows: Float[Array, "m d"], weights: Float[Array, "e d f"], counts: Int[Array, "e"]) -> Float[Array, "m f"]:
    """rows_i @ weights_e, e the group of row i, summed in float32; undefined past the last group. It has no gradient
    of its own here."""
    import tokamax  # pyright: ignore

    kernel = {"implementation": [_kernel()], "preferred_element_type": rows.dtype}
    return tokamax.ragged_dot(rows, weights, counts, **kernel)


@functools.cache
def _kernel() -> Any:
    from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu as mosaic  # pyright: ignore

    sides = {"block_m": _SIDE, "block_n": _SIDE, "block_k": _SUMMED}
    tiles = mosaic.Config(**sides, num_stages=6, split_k=1, persistent=True, grid_tile_width=8)
    return mosaic.PallasMosaicGpuRaggedDot(config=tiles, bypass_device_check=True)
