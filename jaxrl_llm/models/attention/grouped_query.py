"""Grouped-query attention with rotary positions: causal, within a segment, over a batch or over a cache."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, SegmentIds
from jaxrl_llm.models.architecture import ModelConfig, Rows
from jaxrl_llm.models.attention import kv_cache
from jaxrl_llm.models.attention.attend import attend, attend_cached, attend_causal
from jaxrl_llm.models.attention.attend_blocks import attend_blocks, skips_blocks
from jaxrl_llm.models.attention.context_parallel import attend_halves, attend_spread
from jaxrl_llm.models.attention.flash import choose_attention, flash_attention
from jaxrl_llm.models.attention.flash_decode import attend_filled
from jaxrl_llm.models.layers import RMSNorm, matrix, project


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
        rows: Rows = "packed",
        cache: kv_cache.LayerCache | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> tuple[Float[Array, "b t d"], Any]:
        """Returns the output and this layer's keys and values: the updated cache, or without one these tokens alone, or
        with one layer of a stack these tokens' [b t kv d], for `kv_cache.write_stack`.

        Where axes, the logical ones of b and t, split t, `visible` is not read. rows: as in `Model.apply`."""
        b, t, _ = x.shape
        layout = kv_cache.layout_of(self.config, sharding.platform(mesh))
        # Two dimensions: a weight's gradient is then one matmul without a transpose.
        flat = sharding.flat(x, axes, mesh)
        projected = (sharding.unflat(self._project(name, flat), (b, t), axes, mesh) for name in "qkv")
        q, k, v = (y.reshape(b, t, -1, self.config.head_dim) for y in projected)
        q, k = rotate(q, rope), rotate(k, rope)
        if cache is None:
            keys, values = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
            if choose_attention(self.config, sharding.platform(mesh)) == "flash":
                y = flash_attention(q, keys, values, segment_ids, mesh, axes, rows)
            elif sharding.shards(axes[1], mesh) > 1:
                y = attend_spread(attend_halves(attend), q, keys, values, segment_ids, axes, mesh)
            elif rows == "shared" and skips_blocks(t, mesh):
                y = attend_blocks(q, keys, values, visible)
            else:
                y = attend_causal(q, keys, values, visible)
            kv = (jnp.swapaxes(keys, 2, 3) if layout.key_columns == -1 else keys,), (values,)
        elif layout.stacked:
            kv, (shared_keys, shared_values) = (k, v), cache.prefix
            keys = *shared_keys, *cache.keys, jnp.swapaxes(k, 1, 2)
            values = *shared_values, *cache.values, jnp.swapaxes(v, 1, 2)
            y = attend_cached(q, keys, values, visible, sharding.platform(mesh), layout)
        else:
            kv, (shared_keys, shared_values) = kv_cache.write(*cache[:2], k, v, cache.column, layout), cache.prefix
            keys, values = (*shared_keys, *kv[0]), (*shared_values, *kv[1])
            if layout == kv_cache.FILLED:
                y = attend_filled(q, keys, values, visible, cache.column + 1, mesh)
            else:
                y = attend_cached(q, keys, values, visible, sharding.platform(mesh), layout)
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


def rotation(
    positions: Integer[Array, "b t"], head_dim: int, theta: float, scaling: tuple[float, ...] = ()
) -> tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]:
    """cos and sin of position * theta^(-2i/d), i < d/2, shared by all heads and layers; `scaling` as in `_scaled`."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    frequency = _scaled(frequency, *scaling) if scaling else frequency
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency[None, None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def _scaled(frequency: Array, factor: float, low: float, high: float, original: float) -> Array:
    """Llama 3's longer context (arXiv 2407.21783): with n = original * frequency / 2 pi turns over the original length,

    frequency / factor for n < low,   frequency for n > high,   and a mixture, linear in n, in between.
    """
    kept = jnp.clip((original * frequency / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / factor


def rotate(
    x: Float[Array, "b t h d"], rope: tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]
) -> Float[Array, "b t h d"]:
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), computed in float32."""
    cos, sin = rope
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
