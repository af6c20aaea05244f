"""Layers whose attention is the gated delta rule (Gated DeltaNet, arXiv 2412.06464, as Qwen3-Next has it). Loaded where
a config has them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.attention.delta_rule import causal_convolution, delta_rule, order_of
from jaxrl_llm.models.attention.kv_cache import LayerCache, State, empty_state
from jaxrl_llm.models.kernels import Seen
from jaxrl_llm.models.layers import RMSNorm, matrix, project

_EPS = 1e-6  # of the norms of q and k, whatever rms_norm_eps is


class DeltaNet(nnx.Module):
    """With c(x) a causal convolution of each channel, and each key head serving consecutive value heads:

        [q, k, v] = silu(c([x W_q, x W_k, x W_v])),   q = q / |q| / sqrt(d_k),   k = k / |k|
        beta = sigmoid(x W_b),   g = -e^decay softplus(x W_a + decay_bias)
        y = norm(delta_rule(q, k, v, g, beta)) * silu(x W_z),   then W_out

    A cache holds the last inputs of the convolution and the state of the rule, whatever the number of tokens.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, heads = config.hidden_size, config.linear_num_value_heads
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = heads * config.linear_value_head_dim
        self.in_q = matrix(rngs, (d, keys), ("embed", "kv_heads"), config)
        self.in_k = matrix(rngs, (d, keys), ("embed", "kv_heads"), config)
        self.in_v = matrix(rngs, (d, values), ("embed", "heads"), config)
        self.in_z = matrix(rngs, (d, values), ("embed", "heads"), config)
        self.in_b = matrix(rngs, (d, heads), ("embed", "heads"), config)
        self.in_a = matrix(rngs, (d, heads), ("embed", "heads"), config)
        taps = config.linear_conv_kernel_dim
        drawn = jax.random.normal(rngs.params(), (2 * keys + values, 1, taps), jnp.float32) * taps**-0.5
        self.convolution = nnx.Param(drawn.astype(config.param_dtype), logical=("norm", "norm", "norm"))
        decay = jnp.log(jax.random.uniform(rngs.params(), (heads,), minval=0.01, maxval=16.0))
        self.decay = nnx.Param(decay.astype(config.param_dtype), logical=("heads",))
        self.decay_bias = nnx.Param(jnp.ones(heads, config.param_dtype), logical=("heads",))
        self.out_norm = RMSNorm(config.linear_value_head_dim, dataclasses.replace(config, norm_offset=False))
        self.out = matrix(rngs, (values, d), ("heads", "embed"), config)
        self.config = config

    def __call__(
        self, x: Float[Array, "b t d"], seen: Seen, cache: LayerCache | None
    ) -> tuple[Float[Array, "b t d"], tuple[State, tuple[()]]]:
        """Return the output, and this layer's state in the place of keys. Raises ValueError for answers that share a
        prompt, each of which would need its state."""
        (b, t, _), axes, mesh, config = x.shape, seen.axes, seen.kernels.mesh, self.config
        if seen.rows == "shared":
            raise ValueError(
                "answers that share a prompt (updates.layout=shared) have no form for layers of linear_attention "
                "(model.layer_types); set updates.layout=packed"
            )

        flat = sharding.flat(x, axes, mesh)

        def product(weight: Any, rows: Array = flat) -> Array:
            return sharding.unflat(project(rows, weight[...]), (b, t), axes, mesh)

        order, real = order_of(seen.segment_ids), seen.segment_ids != 0
        held = empty_state(config, b) if cache is None else cache.keys
        inputs = jnp.concatenate([product(weight) for weight in (self.in_q, self.in_k, self.in_v)], axis=-1)
        weight = self.convolution[...][:, 0].astype(x.dtype)
        mixed, window = causal_convolution(inputs, weight, held.window[:, 0], order, real)
        mixed = jax.nn.silu(mixed).astype(x.dtype).astype(jnp.float32)
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        q, k, v = jnp.split(mixed, (keys, 2 * keys), axis=-1)
        q, k = self._unit(q) * config.linear_key_head_dim**-0.5, self._unit(k)
        v = v.reshape(b, t, -1, config.linear_value_head_dim)
        beta, step = (product(weight).astype(jnp.float32) for weight in (self.in_b, self.in_a))
        rate, bias = (y[...].astype(jnp.float32)[None, None] for y in (self.decay, self.decay_bias))
        decay = -jnp.exp(rate) * jax.nn.softplus(step + bias)
        # A token of padding leaves the state as it is.
        decay, beta = (jnp.where(real[..., None], y, 0) for y in (decay, jax.nn.sigmoid(beta)))
        y, matrices = delta_rule(q, k, v, decay, beta, order, held.matrices)
        gates = jax.nn.silu(product(self.in_z).astype(jnp.float32)).reshape(y.shape)
        y = (self.out_norm(y.astype(x.dtype)) * gates).astype(x.dtype)
        return product(self.out, sharding.flat(y.reshape(b, t, -1), axes, mesh)), (State(window[:, None], matrices), ())

    def _unit(self, x: Float[Array, "b t keys"]) -> Float[Array, "b t h k"]:
        """Vectors of length 1, each as often as its head has value heads."""
        heads, served = self.config.linear_num_key_heads, self.config.linear_num_value_heads
        x = x.reshape(*x.shape[:2], heads, -1)
        return jnp.repeat(x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS), served // heads, axis=2)
