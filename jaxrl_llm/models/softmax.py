"""The log-softmax of tokens that are drawn and of tokens that are scored."""

import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float

OUT = -1e30  # its weight is 0, and so is weight * logit


def log_softmax(
    logits: Float[Array, "n v"], of_target: Float[Array, "n"]
) -> tuple[Float[Array, "n"], Float[Array, "n"], Float[Array, "n"], Float[Array, "n v"]]:
    """log p of the tokens with these logits, entropy, log of the partition sum and p = softmax(logits).

    Sampler and trainer share it: two formulas differ in the last bit. A token is taken out by a logit of `OUT`, or of
    -inf where the entropy is not used.
    """
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1)
    log_partition = jnp.log(total) + top[:, 0]
    mean = jnp.sum(weights * logits, axis=-1) / total
    return of_target - log_partition, log_partition - mean, log_partition, weights / total[:, None]
