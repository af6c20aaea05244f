"""Rows times each group's matrix on a Hopper GPU by the kernel of the library tokamax, where its version is installed.

On an H100, in bfloat16, by the tables that tokamax 0.0.17 ships (393216 rows in 128 groups), the kernel takes 2.69 ms
where Triton takes 3.10 for matrices 2048 x 768, and 3.21 ms where it takes 8.13 for 768 x 2048. Its kernel for the
gradient of the matrices takes 11.2 and 10.4 ms where Triton takes 1.7, so that gradient stays in `triton_matmul.py`.
With few rows Triton is ahead on an H100 (jax 0.11.2, wall time of a call): it takes 0.40 to 0.43 ms for 32768 rows in
128 groups, 2048 x 768, and tokamax 0.44 to 0.56, with both gradients 1.15 to 1.32 and 1.58 to 1.74, since this one is
given copies of transposed matrices.
"""

import functools
import importlib.metadata
from typing import Any

import jax.numpy as jnp
from jax.extend import backend

from jaxrl_llm.ground.array_typing import Array, Float, Int

VERSION = "0.0.17"  # the tiles below are an argument of a class that tokamax does not call public
_ROWS, _WIDTH = 128, 64  # of a block of the result; sides of the matrices are multiples of the second
_MANY = 1024  # rows of a group at an even load: at 256 Triton is faster, at 3072 this kernel


def fits(rows: Array, weights: Array) -> bool:
    """Whether the kernel is here, takes these arrays, and has many rows for each group at an even load."""
    (m, d), groups = rows.shape, len(weights)
    whole = m % 8 == 0 and d % _WIDTH == 0 and weights.shape[2] % _WIDTH == 0 and m >= _MANY * groups
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
    """With the tiles that tokamax's tables record as best for 393216 rows, which it looks up for these shapes alone."""
    from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu as mosaic  # pyright: ignore

    sides = {"block_m": _ROWS, "block_n": _WIDTH, "block_k": 128}
    tiles = mosaic.Config(**sides, num_stages=4, split_k=1, persistent=True, grid_tile_width=8)
    return mosaic.PallasMosaicGpuRaggedDot(config=tiles, bypass_device_check=True)
