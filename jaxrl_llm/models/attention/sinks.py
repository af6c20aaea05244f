"""One more column of each head with a learned score and the value 0 (gpt-oss, arXiv 2508.10925). Loaded where a config
has it."""

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float


def softmax_beside(scores: Float[Array, "b kv g t s"], sinks: Float[Array, " h"]) -> Float[Array, "b kv g t s"]:
    """Softmax over the scores and the sink of each head, which is left out of the result."""
    sink = sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
    both = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    return jax.nn.softmax(both, axis=-1)[..., :-1]


def gradient(weights: Float[Array, "b kv q s"], along: Float[Array, "b kv q 1"], sinks: Float[Array, " h"]) -> Array:
    """With w the sink's weight and `along` = <do, o>: ds = w (0 - <do, o>), summed over rows and queries."""
    of_sink = (jnp.sum(weights, axis=-1, keepdims=True) - 1) * along
    return jnp.sum(of_sink.reshape(len(weights), len(sinks), -1), axis=(0, 2)).astype(sinks.dtype)
