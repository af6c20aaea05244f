"""Grouped matmuls of other platforms on this one, and what they must give: a loop over the groups."""

import itertools

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.experts import grouped_matmul as module
from jaxrl_llm.models.experts.triton_matmul import grouped_matmul_gpu


def interpreted(rows, weights, counts, platform=None, *, kernel):
    """`grouped_matmul` by the kernel of a GPU or TPU, run as plain JAX."""
    run = {"gpu": grouped_matmul_gpu, "tpu": module._by_tiles}[kernel]
    return run(rows, weights, counts, True)


def by_loop(rows, weights, counts):
    """In float32, given in the type of the rows; counts are numbers."""
    dtype = rows.dtype
    ends = np.cumsum((0, *counts)).tolist()
    rows, weights = rows.astype(jnp.float32), weights.astype(jnp.float32)
    parts = [rows[a:b] @ w for (a, b), w in zip(itertools.pairwise(ends), weights, strict=True)]
    return jnp.concatenate([*parts, jnp.zeros((len(rows) - ends[-1], weights.shape[2]))]).astype(dtype)
