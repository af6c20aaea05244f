"""Keys and values of the tokens fed so far, head-major so that a decode step reads them in order.

Keys lie transposed, [b kv d s]: both products of attention then run along their last axis, which on a CPU is five times
faster for q k^T than a transposed operand that has to be repacked at every step.

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
    """One array a layer; a tuple, not a stack, so that a decode step updates each layer in place."""

    keys: tuple[Float[Array, "b kv d s"], ...]
    values: tuple[Float[Array, "b kv s d"], ...]


def empty(config: ModelConfig, rows: int, length: int) -> KVCache:
    b, kv, d = rows, config.num_key_value_heads, config.head_dim
    zeros = lambda *shape: tuple(jnp.zeros(shape, config.compute_dtype) for _ in config.kinds)  # noqa: E731
    return KVCache(keys=zeros(b, kv, d, length), values=zeros(b, kv, length, d))


def write(
    keys: Float[Array, "b kv d s"],
    values: Float[Array, "b kv s d"],
    new_keys: Float[Array, "b t kv d"],
    new_values: Float[Array, "b t kv d"],
    column: Integer[Array, "b"],
) -> tuple[Float[Array, "b kv d s"], Float[Array, "b kv s d"]]:
    """Write t consecutive columns of every row, from that row's own `column` on."""
    put = jax.vmap(lambda row, update, *start: jax.lax.dynamic_update_slice(row, update, start))
    zero = jnp.zeros_like(column)
    keys = put(keys, new_keys.transpose(0, 2, 3, 1).astype(keys.dtype), zero, zero, column)
    return keys, put(values, new_values.transpose(0, 2, 1, 3).astype(values.dtype), zero, column, zero)
