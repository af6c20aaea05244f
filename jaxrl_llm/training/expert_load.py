"""How evenly the tokens of a batch spread over the experts of each layer, and the bias that evens them out."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.array_typing import Array, Float, Integer, Mask


def tokens_sent(experts: Integer[Array, "l b t k"], num_experts: int, mask: Mask | None = None) -> Float[Array, "l e"]:
    """Count the tokens that each expert was sent, of all or of those in the mask; no record counts nowhere."""
    experts = experts.astype(jnp.int32)
    if mask is not None:
        experts = jnp.where(mask[None, ..., None], experts, num_experts)
    return jax.vmap(lambda of: jnp.zeros(num_experts).at[of.ravel()].add(1.0, mode="drop"))(experts)


def load(sent: Float[Array, "l e"]) -> dict[str, M.Metric]:
    """How evenly tokens spread: E max_e f_e and the share of experts in use, by layer (1 and 1 when even)."""
    largest = sent.shape[1] * jnp.max(sent, axis=1) / jnp.maximum(jnp.sum(sent, axis=1), 1)
    one = jnp.ones_like(largest)
    in_use = jnp.mean(sent > 0, axis=1)
    return {"routing/load_max_by_layer": M.Mean(largest, one), "routing/experts_used_by_layer": M.Mean(in_use, one)}


def evened(policy: Any, sent: Float[Array, "l e"], rate: float) -> Any:
    """The parameters of a policy with each bias of the gate's choice moved towards an even load.

        b_e <- b_e + rate sign(mean_e n_e - n_e)

    Source: balancing without a loss, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2.

    Args:
      policy: with policy["moe"]["mlp"]["router_bias"], [l e].
      sent: n, the tokens of a step that chose each expert.
    """
    mlp = policy["moe"]["mlp"]
    bias = mlp["router_bias"] + rate * jnp.sign(jnp.mean(sent, axis=1, keepdims=True) - sent)
    return {**policy, "moe": {**policy["moe"], "mlp": {**mlp, "router_bias": bias}}}
