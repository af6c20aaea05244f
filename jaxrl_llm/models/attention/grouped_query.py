"""Grouped-query attention: causal, within a segment, over a batch or over a cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Float, SegmentIds
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.attention import kv_cache
from jaxrl_llm.models.attention.attend import attend, attend_cached, attend_causal
from jaxrl_llm.models.attention.context_parallel import attend_halves, attend_spread
from jaxrl_llm.models.attention.flash import choose_attention, flash_attention
from jaxrl_llm.models.attention.rope import rotate
from jaxrl_llm.models.low_rank import project

__all__ = ["Attention", "RMSNorm"]


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32 (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, config: ModelConfig):
        self.scale = nnx.Param(jnp.ones(size, config.param_dtype), logical=("norm",))
        self.eps = config.rms_norm_eps

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return _normalise(x, self.scale[...], self.eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _normalise(x: Array, scale: Array, eps: float) -> Array:
    return _normalise_fwd(x, scale, eps)[0]


def _normalise_fwd(x: Array, scale: Array, eps: float) -> tuple[Array, Any]:
    y = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * inverse * _on_last_axis(scale, x.ndim)).astype(x.dtype), (x, inverse, scale)


def _normalise_bwd(eps: float, residuals: Any, cotangent: Array) -> tuple[Array, Array]:
    """With y = x / rms and g = scale dy: dx = (g - y mean(g y)) / rms, dscale = sum dy y. Written by hand, because the
    one that autodiff derives reads and writes the states about twice as often."""
    x, inverse, scale = residuals
    y, dy = x.astype(jnp.float32) * inverse, cotangent.astype(jnp.float32)
    g = dy * _on_last_axis(scale, x.ndim)
    dx = inverse * (g - y * jnp.mean(g * y, axis=-1, keepdims=True))
    return dx.astype(x.dtype), jnp.sum(dy * y, axis=tuple(range(x.ndim - 1))).astype(scale.dtype)


_normalise.defvjp(_normalise_fwd, _normalise_bwd)


def _on_last_axis(scale: Array, ndim: int) -> Array:
    return scale.astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))


def matrix(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], config: ModelConfig) -> nnx.Param:
    """A weight with standard deviation 1/sqrt(fan_in) and its logical axes."""
    values = jax.random.normal(rngs.params(), shape, jnp.float32) * shape[-2] ** -0.5
    return nnx.Param(values.astype(config.param_dtype), logical=axes)


class Attention(nnx.Module):
    """q, k, v, o; biases on q, k, v (`attention_bias`); RMSNorm of q and k (`qk_norm`), then RoPE.

    Sources: grouped queries arXiv 2305.13245; q/k norm over the head dimension Qwen3, arXiv 2505.09388, over all heads
    OLMoE, arXiv 2409.02060; biases Qwen2, arXiv 2407.10671.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, head = config.hidden_size, config.head_dim
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        self.q = matrix(rngs, (d, heads * head), ("embed", "heads"), config)
        self.k = matrix(rngs, (d, kv * head), ("embed", "kv_heads"), config)
        self.v = matrix(rngs, (d, kv * head), ("embed", "kv_heads"), config)
        self.o = matrix(rngs, (heads * head, d), ("heads", "embed"), config)
        if config.attention_bias:
            self.q_bias = nnx.Param(jnp.zeros(heads * head, config.param_dtype), logical=("heads",))
            self.k_bias = nnx.Param(jnp.zeros(kv * head, config.param_dtype), logical=("kv_heads",))
            self.v_bias = nnx.Param(jnp.zeros(kv * head, config.param_dtype), logical=("kv_heads",))
        if config.qk_norm != "none":
            per_head = config.qk_norm == "head"
            self.q_norm = RMSNorm(head if per_head else heads * head, config)
            self.k_norm = RMSNorm(head if per_head else kv * head, config)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "b t d"],
        rope: tuple[Array, Array],
        visible: Bool[Array, "b t s"],
        segment_ids: SegmentIds,
        axes: tuple[str, str | None] = sharding.MICRO_BATCH,
        cache: kv_cache.LayerCache | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> tuple[Float[Array, "b t d"], tuple[kv_cache.Keys, kv_cache.Values]]:
        """Returns the output and this layer's keys and values: the updated cache, or without one these tokens alone.

        axes: the logical axes of b and t; where they split t, `visible` is not read.
        """
        b, t, _ = x.shape
        # Two dimensions: a weight's gradient is then one matmul without a transpose.
        flat = sharding.flat(x, axes, mesh)
        projected = (sharding.unflat(self._project(name, flat), (b, t), axes, mesh) for name in "qkv")
        q, k, v = (y.reshape(b, t, -1, self.config.head_dim) for y in projected)
        q, k = rotate(q, rope), rotate(k, rope)
        if cache is None:
            keys, values = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
            if choose_attention(self.config, sharding.platform(mesh)) == "flash":
                y = flash_attention(q, keys, values, segment_ids, mesh, axes)
            elif sharding.shards(axes[1], mesh) > 1:
                y = attend_spread(attend_halves(attend), q, keys, values, segment_ids, axes, mesh)
            else:
                y = attend_causal(q, keys, values, visible)
            kv = (jnp.swapaxes(keys, 2, 3),), (values,)
        else:
            kv = kv_cache.write(cache.keys, cache.values, k, v, cache.column)
            shared_keys, shared_values = cache.prefix
            y = attend_cached(q, (*shared_keys, *kv[0]), (*shared_values, *kv[1]), visible, sharding.platform(mesh))
        flat = sharding.flat(y.reshape(b, t, -1), axes, mesh)
        return sharding.unflat(project(flat, self.o[...]), (b, t), axes, mesh), kv

    def _project(self, name: str, x: Float[Array, "n d"]) -> Float[Array, "n heads"]:
        """x W_name, with its bias and its norm where the architecture has them."""
        y = project(x, getattr(self, name)[...])
        if self.config.attention_bias:
            y = y + getattr(self, f"{name}_bias")[...].astype(x.dtype)[None]
        if name == "v" or self.config.qk_norm == "none":
            return y
        norm: RMSNorm = getattr(self, f"{name}_norm")
        return norm(y.reshape(*x.shape[:1], -1, norm.scale.shape[0])).reshape(y.shape)
