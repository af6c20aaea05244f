"""Keys and values of the tokens fed so far, head-major so that a decode step reads them in order.

Rows are left-aligned and contiguous: the token at position p of a row sits in column p, whatever the other rows do. A
query at position p sees columns <= p, so columns left over from padding or from an earlier answer are never read.
"""

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.array_typing import Array, Float, Integer
from jaxrl_llm.models.config import ModelConfig

__all__ = ["KVCache", "empty", "write"]


class KVCache(flax.struct.PyTreeNode):
    """One [b kv s d] array a layer; a tuple, not a stack, so that a decode step updates each layer in place."""

    keys: tuple[Float[Array, "b kv s d"], ...]
    values: tuple[Float[Array, "b kv s d"], ...]


def empty(config: ModelConfig, rows: int, length: int) -> KVCache:
    shape = (rows, config.num_key_value_heads, length, config.head_dim)
    layers = range(config.num_hidden_layers)
    return KVCache(
        keys=tuple(jnp.zeros(shape, config.compute_dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, config.compute_dtype) for _ in layers),
    )


def write(
    cache: Float[Array, "b kv s d"], new: Float[Array, "b t kv d"], column: Integer[Array, "b"]
) -> Float[Array, "b kv s d"]:
    """Write t consecutive columns of every row, from that row's own `column` on."""
    new = jnp.swapaxes(new, 1, 2).astype(cache.dtype)
    put = lambda row, update, start: jax.lax.dynamic_update_slice(row, update, (0, start, 0))  # noqa: E731
    return jax.vmap(put)(cache, new, column)
