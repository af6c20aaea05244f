"""Grouped-query attention with q/k norm, as in Qwen3: causal, within a segment, over a batch or over a cache."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.array_typing import Array, Bool, Float, Integer
from jaxrl_llm.models import kv_cache
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.rope import rotate

__all__ = ["Attention", "RMSNorm", "attend", "attend_cached", "flash_available"]

_MASKED = -1e30  # finite: a fully masked row (padding) gives a uniform, not a NaN, softmax


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32 (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, config: ModelConfig, axis: str = "norm"):
        self.scale = nnx.Param(jnp.ones(size, config.param_dtype), logical=(axis,))
        self.eps = config.rms_norm_eps

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (y * scale).astype(x.dtype)


def matrix(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], config: ModelConfig) -> nnx.Param:
    """A weight with standard deviation 1/sqrt(fan_in) and its logical axes."""
    values = jax.random.normal(rngs.params(), shape, jnp.float32) * shape[-2] ** -0.5
    return nnx.Param(values.astype(config.param_dtype), logical=axes)


def flash_available(head_dim: int) -> bool:
    """Whether the platform has a library flash attention for this head size (GPU: cuDNN through jax.nn)."""
    return jax.default_backend() == "gpu" and head_dim % 8 == 0


def attend(
    queries: Float[Array, "b t h d"],
    keys: Float[Array, "b kv s d"],
    values: Float[Array, "b kv s d"],
    visible: Bool[Array, "b t s"],
    implementation: str = "plain",
) -> Float[Array, "b t h d"]:
    """softmax(q k^T / sqrt(d)) v over the visible columns; scores and softmax in float32."""
    if implementation == "flash":
        return jax.nn.dot_product_attention(
            queries, jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2), mask=visible[:, None], implementation="cudnn"
        )
    return _plain(queries, keys, values, visible, "bkqd,bksd->bkqs")


def attend_cached(
    queries: Float[Array, "b t h d"],
    keys: Float[Array, "b kv d s"],
    values: Float[Array, "b kv s d"],
    visible: Bool[Array, "b t s"],
) -> Float[Array, "b t h d"]:
    """The same over a cache, whose keys are transposed."""
    return _plain(queries, keys, values, visible, "bkqd,bkds->bkqs")


def _plain(queries: Array, keys: Array, values: Array, visible: Array, product: str) -> Array:
    # Head-major, the queries of one key head side by side: both products are plain batched matmuls.
    b, t, h, d = queries.shape
    kv = keys.shape[1]
    q = queries.reshape(b, t, kv, h // kv, d).transpose(0, 2, 3, 1, 4).reshape(b, kv, (h // kv) * t, d)
    scores = jnp.einsum(product, q * d**-0.5, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(b, kv, h // kv, t, -1)
    scores = jnp.where(visible[:, None, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype).reshape(b, kv, (h // kv) * t, -1)
    out = jnp.einsum("bkqs,bksd->bkqd", weights, values)
    return out.reshape(b, kv, h // kv, t, d).transpose(0, 3, 1, 2, 4).reshape(b, t, h, d)


class Attention(nnx.Module):
    """q, k, v, o without biases; RMSNorm over the head dimension of q and k, then RoPE (Qwen3, arXiv 2505.09388)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, head = config.hidden_size, config.head_dim
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        self.q = matrix(rngs, (d, heads * head), ("embed", "heads"), config)
        self.k = matrix(rngs, (d, kv * head), ("embed", "kv_heads"), config)
        self.v = matrix(rngs, (d, kv * head), ("embed", "kv_heads"), config)
        self.o = matrix(rngs, (heads * head, d), ("heads", "embed"), config)
        self.q_norm = RMSNorm(head, config)
        self.k_norm = RMSNorm(head, config)
        self.head_dim = head
        self.implementation = config.attention_implementation
        if self.implementation == "auto":
            self.implementation = "flash" if flash_available(head) and config.dtype == "bfloat16" else "plain"

    def __call__(
        self,
        x: Float[Array, "b t d"],
        rope: tuple[Array, Array],
        visible: Bool[Array, "b t s"],
        cache: tuple[Array, Array, Integer[Array, "b"]] | None = None,
    ) -> tuple[Float[Array, "b t d"], tuple[Array, Array]]:
        """Returns the output and this layer's keys and values (the updated cache, where one was given)."""
        b, t, _ = x.shape
        split = lambda w: (x @ w[...].astype(x.dtype)).reshape(b, t, -1, self.head_dim)  # noqa: E731
        q, k, v = rotate(self.q_norm(split(self.q)), rope), rotate(self.k_norm(split(self.k)), rope), split(self.v)
        if cache is None:
            k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        else:
            keys, values, column = cache
            k, v = kv_cache.write(keys, values, k, v, column)
        y = attend(q, k, v, visible, self.implementation) if cache is None else attend_cached(q, k, v, visible)
        return y.reshape(b, t, -1) @ self.o[...].astype(x.dtype), (k, v)
