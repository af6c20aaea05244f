"""The two kinds of feed-forward layer: SwiGLU, and a mixture of SwiGLU experts with its router."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer
from jaxrl_llm.ground.masking import segment_sum
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.experts.implementations import apply_experts
from jaxrl_llm.models.layers import OfLayer, matrix, project, whole
from jaxrl_llm.models.routing import EXACT, Router, Routing, select_experts


class SwiGLU(nnx.Module):
    """silu(x W_gate) * (x W_up) W_down (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, f = config.hidden_size, config.intermediate_size
        self.gate = matrix(rngs, (d, f), ("embed", "mlp"), config)
        self.up = matrix(rngs, (d, f), ("embed", "mlp"), config)
        self.down = matrix(rngs, (f, d), ("mlp", "embed"), config)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        return _gated(project(x, self.gate[...]), project(x, self.up[...]), self.down[...])


@functools.partial(jax.checkpoint, prevent_cse=False)
def _gated(gate: Float[Array, "b t f"], up: Float[Array, "b t f"], down: Any) -> Float[Array, "b t d"]:
    """(silu(gate) * up) W_down. Of six arrays of this width the backward keeps two and computes the others again."""
    return project(jax.nn.silu(gate) * up, down)


class MoE(nnx.Module):
    """Router softmax -> top-k -> renormalise -> weighted sum of experts (Qwen3-MoE). Dropless."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, f, e = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.router = matrix(rngs, (d, e), ("embed", "router"), config)
        self.gate = matrix(rngs, (e, d, f), ("expert", "embed", "mlp"), config)
        self.up = matrix(rngs, (e, d, f), ("expert", "embed", "mlp"), config)
        self.down = matrix(rngs, (e, f, d), ("expert", "mlp", "embed"), config)
        self.num_chosen = config.num_experts_per_tok
        self.normalise = config.norm_topk_prob
        self.implementation = config.experts_implementation

    def __call__(
        self,
        x: Float[Array, "b t d"],
        replay: Routing | None,
        mesh: jax.sharding.Mesh | None,
        axes: tuple[str, str | None] = sharding.MICRO_BATCH,
        router: Router = EXACT,
    ) -> tuple[Float[Array, "b t d"], Routing]:
        """Returns the output, and the experts used with the current router's logits; axes: those of b and t."""
        logits = router.logits(x, whole(self.router[...]))
        experts, gates = select_experts(logits, self.num_chosen, self.normalise, replay, router.choosing(logits))
        gate, up, down = (_cast(w, x.dtype, mesh) for w in (self.gate, self.up, self.down))
        rows, chosen, weights = (sharding.flat(a, axes, mesh) for a in (x, experts, gates))
        y = apply_experts(rows, chosen, weights, gate, up, down, implementation=self.implementation, mesh=mesh)
        return sharding.unflat(y, x.shape[:2], axes, mesh), Routing(experts, logits)


def _cast(weight: nnx.Param, dtype: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """Pinned, so that slices are cast before they are gathered; a stack lies where it is read."""
    w = weight[...]
    if isinstance(w, OfLayer):
        return w.astype(dtype)
    return sharding.constrain(whole(w).astype(dtype), weight.get_metadata()["logical"], mesh)


def load_balance_loss(
    logits: Float[Array, "l b t e"],
    experts: Integer[Array, "l b t k"],
    mask: Bool[Array, "b t"],
    sequence_ids: Integer[Array, "b t"],
    num_sequences: int,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Load-balance loss of each sequence, summed over sequences and averaged over layers: (total, count).

    E sum_e f_e p_e per sequence and layer, with f_e the share of the sequence's (token, slot) pairs sent to expert e
    and p_e its mean router probability over the sequence's tokens; 1 when balanced. It is taken per sequence, not per
    batch, so that it does not depend on how the batch is cut. Source: Switch Transformer, arXiv 2101.03961, eq. 4;
    sequence-wise as in DeepSeek-V3, arXiv 2412.19437, eq. 17.
    """
    num_experts, experts_per_token = logits.shape[-1], experts.shape[-1]
    tokens = segment_sum(mask.astype(jnp.float32), mask, sequence_ids, num_sequences)
    length = jnp.maximum(tokens, 1)

    @functools.partial(jax.vmap, in_axes=-1, out_axes=-1)
    def mean_per_sequence(x: Array) -> Array:
        return segment_sum(x, mask, sequence_ids, num_sequences) / length

    def of_layer(layer_logits: Array, layer_experts: Array) -> Array:
        probs = jax.nn.softmax(layer_logits, axis=-1)
        used = jnp.sum(jax.nn.one_hot(layer_experts, num_experts), axis=-2) / experts_per_token
        return num_experts * jnp.sum(mean_per_sequence(used) * mean_per_sequence(probs))

    return jnp.mean(jax.vmap(of_layer)(logits, experts)), jnp.sum(tokens > 0).astype(jnp.float32)
