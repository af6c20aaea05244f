"""Grouped-query attention with rotary positions: causal, within a segment, over a batch or over a cache."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float, Integer, SegmentIds
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models.architecture import ModelConfig, Rows
from jaxrl_llm.models.attention import kv_cache
from jaxrl_llm.models.attention.attend import attend, attend_cached, attend_causal
from jaxrl_llm.models.attention.choice import skips_blocks
from jaxrl_llm.models.attention.rotary import rotate
from jaxrl_llm.models.kernels import Seen
from jaxrl_llm.models.layers import RMSNorm, matrix, project, scaled

_KERNELS = ByName(
    {
        "attend_blocks": "jaxrl_llm.models.attention.attend_blocks",
        "attend_filled": "jaxrl_llm.models.attention.flash_decode",
        "attend_halves": "jaxrl_llm.models.attention.context_parallel",
        "attend_spread": "jaxrl_llm.models.attention.context_parallel",
        "flash_attention": "jaxrl_llm.models.attention.flash",
    }
)


class Attention(nnx.Module):
    """q, k, v, o; biases on q, k, v (`attention_bias`) and o; RMSNorm of q and k (`qk_norm`), then RoPE; a sigmoid of
    the state that weights the output (`attn_output_gate`).

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
        if config.attention_output_bias:
            self.o_bias = nnx.Param(jnp.zeros(d, config.param_dtype), logical=("norm",))
        if config.attn_output_gate:
            self.out_gate = matrix(rngs, (d, heads * head), ("embed", "heads"), config)
        if config.attention_sinks:
            self.sinks = nnx.Param(jnp.zeros(heads, config.param_dtype), logical=("heads",))
        if config.qk_norm != "none":
            per_head = config.qk_norm == "head"
            self.q_norm = RMSNorm(head if per_head else heads * head, config)
            self.k_norm = RMSNorm(head if per_head else kv * head, config)
        self.config = config
        # The kernels multiply scores by head_dim^-1/2.
        self.query_factor = config.attention_multiplier * config.head_dim**0.5 or 1.0

    def __call__(
        self, x: Float[Array, "b t d"], seen: Seen, cache: kv_cache.LayerCache | None
    ) -> tuple[Float[Array, "b t d"], Any]:
        """Return the output and this layer's keys and values: the updated cache, or without one these tokens alone, or
        with one layer of a stack these tokens' [b t kv d], for `kv_cache.write_stack`."""
        b, t, _ = x.shape
        rope, visible, segment_ids, axes, rows, kernels, *_ = seen
        mesh, layout = kernels.mesh, kernels.cache
        sinks = self.sinks[...] if self.config.attention_sinks else None
        # Two dimensions: a weight's gradient is then one matmul without a transpose.
        flat = sharding.flat(x, axes, mesh)
        projected = (sharding.unflat(self._project(name, flat), (b, t), axes, mesh) for name in "qkv")
        q, k, v = (y.reshape(b, t, -1, self.config.head_dim) for y in projected)
        pairs = self.config.rope_interleave
        q, k = scaled(rotate(q, rope, pairs), self.query_factor), rotate(k, rope, pairs)
        if cache is None:
            keys, values = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
            if kernels.attention == "flash":
                y = _KERNELS["flash_attention"](q, keys, values, segment_ids, mesh, axes, rows)
            elif sharding.shards(axes[1], mesh) > 1:
                halves = _KERNELS["attend_halves"](attend)
                y = _KERNELS["attend_spread"](halves, q, keys, values, segment_ids, axes, mesh)
            elif rows == "shared" and sinks is None and skips_blocks(t, mesh):
                y = _KERNELS["attend_blocks"](q, keys, values, visible)
            else:
                y = attend_causal(q, keys, values, visible, sinks)
            kv = kv_cache.of_prefill(keys, values, layout)
        else:
            kv, keys, values = kv_cache.extended(cache, k, v, layout)
            if layout == kv_cache.FILLED:
                y = _KERNELS["attend_filled"](q, keys, values, visible, cache.column + 1, mesh)
            else:
                y = attend_cached(q, keys, values, visible, kernels.platform, layout, sinks)
        y = sharding.flat(y.reshape(b, t, -1), axes, mesh)
        if self.config.attn_output_gate:
            y = y * jax.nn.sigmoid(project(flat, self.out_gate[...]))
        out = project(y, self.o[...])
        if self.config.attention_output_bias:
            out = out + self.o_bias[...].astype(out.dtype)[None]
        return sharding.unflat(out, (b, t), axes, mesh), kv

    def _project(self, name: str, x: Float[Array, "n d"]) -> Float[Array, "n heads"]:
        """x W_name, with its bias and its norm where the architecture has them."""
        y = project(x, getattr(self, name)[...])
        if self.config.attention_bias:
            y = y + getattr(self, f"{name}_bias")[...].astype(x.dtype)[None]
        if name == "v" or self.config.qk_norm == "none":
            return y
        norm: RMSNorm = getattr(self, f"{name}_norm")
        return norm(y.reshape(*x.shape[:1], -1, norm.scale.shape[0])).reshape(y.shape)


def positions_of(segment_ids: SegmentIds, rows: Rows = "packed") -> Integer[Array, "b t"]:
    """Position of each token inside its segment (segments are contiguous); answers to a shared prompt continue it."""
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1]), segment_ids.shape)
    first = jnp.ones_like(segment_ids[:, :1], bool)
    starts = jnp.concatenate([first, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    positions = index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    if rows != "shared":
        return positions
    return positions + jnp.where(segment_ids > 1, jnp.sum(segment_ids == 1, axis=1, keepdims=True), 0)
