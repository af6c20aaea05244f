"""Experts with a clamped SwiGLU and with biases (gpt-oss, arXiv 2508.10925), by grouped matmuls."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float, Integer
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.experts.expert_blocks import group_by_expert
from jaxrl_llm.models.experts.grouped_experts import Dot, of_pairs, tokens_of
from jaxrl_llm.models.experts.grouped_matmul import grouped_matmul
from jaxrl_llm.models.experts.implementations import on_mesh
from jaxrl_llm.models.experts.moe import MoE, cast
from jaxrl_llm.models.layers import whole

_SHARPNESS = 1.702  # of the sigmoid, which makes g sigmoid(1.702 g) close to GELU


class ClampedMoE(MoE):
    """`MoE` with biases of experts where the config has them, and with its limit."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        e, f = config.num_experts, config.moe_intermediate_size
        if config.expert_bias:
            zeros = functools.partial(jnp.zeros, dtype=config.param_dtype)
            self.gate_bias = nnx.Param(zeros((e, f)), logical=("expert", "mlp"))
            self.up_bias = nnx.Param(zeros((e, f)), logical=("expert", "mlp"))
            self.down_bias = nnx.Param(zeros((e, config.hidden_size)), logical=("expert", "embed"))

    def of_experts(
        self, x: Float[Array, "n d"], experts: Array, gates: Array, weights: Any, mesh: Any
    ) -> Float[Array, "n d"]:
        """Return the sum over a token's experts, from the matrices of gate, up and down."""
        dot = functools.partial(grouped_matmul, platform=sharding.platform(mesh))
        local = functools.partial(clamped_experts, dot, self.config.swiglu_limit)
        weights = tuple(map(whole, weights))
        if not self.config.expert_bias:
            return on_mesh(local, x, experts, gates, weights, mesh=mesh)
        gate, up, down = (cast(bias, x.dtype, mesh) for bias in (self.gate_bias, self.up_bias, self.down_bias))
        y = on_mesh(local, x, experts, gates, (*weights, gate, up), mesh=mesh)
        return add_down_bias(y, experts, gates, down)


def clamped_experts(
    dot: Dot,
    limit: float,
    x: Float[Array, "n d"],
    experts: Integer[Array, "n k"],
    gates: Float[Array, "n k"],
    weights: Sequence[Any],
) -> Float[Array, "n d"]:
    """y_n = sum_k gates_nk h W_down[e], e = experts_nk, with g = x W_gate[e] + b_gate[e] and u = x W_up[e] + b_up[e]:

        h = (u' + 1) g' sigmoid(1.702 g'),   g' = min(g, limit),   u' = u within -limit and limit

    limit: 0 computes silu(g) u. weights: W_gate, W_up, W_down and perhaps b_gate, b_up. A pair whose expert is not
    among them gives 0.
    """
    w_gate, w_up, w_down, *biases = weights
    groups = group_by_expert(experts, len(w_gate))
    dot = functools.partial(dot, counts=groups.counts)
    token = tokens_of(groups, experts, len(w_gate))
    of_expert = (jnp.arange(len(token)) < jnp.sum(groups.counts))[:, None]  # other rows hold anything, both ways
    rows = jnp.where(of_expert, x[token], 0)
    g, u = (jnp.where(of_expert, dot(rows, weight), 0).astype(jnp.float32) for weight in (w_gate, w_up))
    if biases:
        expert = jnp.minimum(experts.reshape(-1)[groups.order[: len(token)]], len(w_gate) - 1)
        g, u = (y + jnp.take(bias, expert, axis=0).astype(jnp.float32) for y, bias in zip((g, u), biases, strict=True))
    if limit:
        g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
        hidden = (u + 1) * g * jax.nn.sigmoid(_SHARPNESS * g)
    else:
        hidden = jax.nn.silu(g) * u
    out = of_pairs(dot(hidden.astype(x.dtype), w_down), groups, gates.shape)
    return jnp.einsum("nkd,nk->nd", out, gates, preferred_element_type=jnp.float32).astype(x.dtype)


def add_down_bias(
    y: Float[Array, "n d"], experts: Integer[Array, "n k"], gates: Float[Array, "n k"], bias: Float[Array, "e d"]
) -> Float[Array, "n d"]:
    """y_n + sum_k gates_nk bias[experts_nk]: outside of the product, whose sum over devices would count it often."""
    weight = jnp.einsum("nk,nke->ne", gates, jax.nn.one_hot(experts, len(bias), dtype=gates.dtype))
    return (y.astype(jnp.float32) + weight @ bias.astype(jnp.float32)).astype(y.dtype)
