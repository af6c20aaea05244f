"""The two kinds of feed-forward layer: SwiGLU, and a mixture of SwiGLU experts with its router, perhaps beside one
expert that all tokens share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.experts.implementations import apply_experts
from jaxrl_llm.models.kernels import Seen
from jaxrl_llm.models.layers import OfLayer, matrix, project, whole
from jaxrl_llm.models.routing import Routing


class SwiGLU(nnx.Module):
    """silu(x W_gate) * (x W_up) W_down (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, width: int = 0):
        d, f = config.hidden_size, width or config.intermediate_size
        self.gate = matrix(rngs, (d, f), ("embed", "mlp"), config)
        self.up = matrix(rngs, (d, f), ("embed", "mlp"), config)
        self.down = matrix(rngs, (f, d), ("mlp", "embed"), config)

    def __call__(self, x: Float[Array, "b t d"], seen: Seen, replay: None) -> tuple[Float[Array, "b t d"], None]:
        """Return the output; there is no routing."""
        del seen, replay
        return _gated(project(x, self.gate[...]), project(x, self.up[...]), self.down[...]), None


@functools.partial(jax.checkpoint, prevent_cse=False)
def _gated(gate: Float[Array, "b t f"], up: Float[Array, "b t f"], down: Any) -> Float[Array, "b t d"]:
    """(silu(gate) * up) W_down. Of six arrays of this width the backward keeps two and computes the others again."""
    return project(jax.nn.silu(gate) * up, down)


class MoE(nnx.Module):
    """The sum of the outputs of the experts that the gate chooses, by its weights. Dropless.

    A shared expert adds its output, or sigmoid(x w) times its output (Qwen2-MoE).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, f, e = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.of_gate = tuple(config.gate.shapes(d))
        for name, (shape, axes) in config.gate.shapes(d).items():
            vector = len(shape) == 1
            of = nnx.Param(jnp.zeros(shape, jnp.float32), logical=axes) if vector else matrix(rngs, shape, axes, config)
            setattr(self, name, of)
        self.gate = matrix(rngs, (e, d, f), ("expert", "embed", "mlp"), config)
        self.up = matrix(rngs, (e, d, f), ("expert", "embed", "mlp"), config)
        self.down = matrix(rngs, (e, f, d), ("expert", "mlp", "embed"), config)
        if config.shared_expert_intermediate_size:
            self.shared = SwiGLU(config, rngs, config.shared_expert_intermediate_size)
        if config.shared_expert_gate:
            self.shared_gate = matrix(rngs, (d, 1), ("embed", "router"), config)
        self.config = config

    def __call__(
        self, x: Float[Array, "b t d"], seen: Seen, replay: Routing | None
    ) -> tuple[Float[Array, "b t d"], Routing]:
        """Return the output, and the routing with the current router's logits."""
        mesh, axes = seen.kernels.mesh, seen.axes
        routing, gates = seen.gate(x, {name: whole(getattr(self, name)[...]) for name in self.of_gate}, replay)
        gate, up, down = (cast(w, x.dtype, mesh) for w in (self.gate, self.up, self.down))
        rows, chosen, weights = (sharding.flat(a, axes, mesh) for a in (x, routing.experts, gates))
        y = self.of_experts(rows, chosen, weights, (gate, up, down), mesh)
        y = sharding.unflat(y, x.shape[:2], axes, mesh)
        if self.config.shared_expert_intermediate_size:
            shared = self.shared(x, seen, None)[0]
            if self.config.shared_expert_gate:
                shared = jax.nn.sigmoid(project(x, self.shared_gate[...])) * shared
            y = y + shared
        return y, routing

    def of_experts(
        self, x: Float[Array, "n d"], experts: Array, gates: Array, weights: Any, mesh: Any
    ) -> Float[Array, "n d"]:
        """Return the sum over a token's experts, from the matrices of gate, up and down."""
        form = self.config.experts_implementation
        return apply_experts(x, experts, gates, *weights, implementation=form, mesh=mesh)


def cast(weight: nnx.Param, dtype: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """Pinned, so that slices are cast before they are gathered; a stack lies where it is read."""
    w = weight[...]
    if isinstance(w, OfLayer):
        return w.astype(dtype)
    return sharding.constrain(whole(w).astype(dtype), weight.get_metadata()["logical"], mesh)
