"""float32 where it counts: products on this platform, and what sums and updates are made in."""

import os
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["narrow", "set_products", "wide"]

_BY_USER = "JAX_DEFAULT_MATMUL_PRECISION"


def set_products(dtypes: Collection[str], platform: str) -> None:
    """Let products of float32 numbers be float32, if one of `dtypes`, those that a program computes in, is.

    Unless it is told otherwise a GPU rounds their operands to TF32 and a TPU to bfloat16, and then two passes over the
    same tokens differ: on an H100 by 5e-4 nats a token, five times what `training/pending.py` lets pass. Products of
    bfloat16 are the same either way, but a TPU's kernels for them refuse the setting: there all must be float32.
    JAX_DEFAULT_MATMUL_PRECISION in the environment goes first.
    """
    if _BY_USER not in os.environ and platform != "cpu":
        exact = "float32" in dtypes and (platform == "gpu" or set(dtypes) == {"float32"})
        jax.config.update("jax_default_matmul_precision", "highest" if exact else None)


def narrow(x: Any) -> bool:
    """Return whether an array of floating-point numbers has fewer bits than float32."""
    return jnp.finfo(x.dtype).bits < 32


def wide(x: Any) -> Any:
    """The array in float32; one whose type is no narrower stays as it is."""
    return x.astype(jnp.float32) if narrow(x) else x
