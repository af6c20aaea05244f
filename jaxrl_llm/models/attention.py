"""Grouped-query attention with q/k norm, as in Qwen3: causal, within a segment, over a batch or over a cache."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.array_typing import Array, Bool, Float, Integer
from jaxrl_llm.models import kv_cache
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.rope import rotate

__all__ = ["Attention", "RMSNorm", "attend", "attend_cached", "attend_causal", "flash_available"]

_CHUNK, _CHUNKS = 64, 4  # of queries: at least so many tokens, at most so many chunks
_MASKED = -1e30  # finite: a fully masked row (padding) gives a uniform, not a NaN, softmax


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32 (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, config: ModelConfig, axis: str = "norm"):
        self.scale = nnx.Param(jnp.ones(size, config.param_dtype), logical=(axis,))
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
    """With y = x / rms and g = scale dy: dx = (g - y mean(g y)) / rms, dscale = sum dy y. Written by hand: the derived
    one reads and writes the states about twice as often."""
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
    return _plain(queries, keys, values, visible)


def attend_causal(
    queries: Float[Array, "b t h d"],
    keys: Float[Array, "b kv t d"],
    values: Float[Array, "b kv t d"],
    visible: Bool[Array, "b t t"],
) -> Float[Array, "b t h d"]:
    """`attend` where no query sees a later column: chunks of queries, each over the columns up to its end."""
    time = queries.shape[1]
    size = max(_CHUNK, -(-time // _CHUNKS))
    ends = [min(start + size, time) for start in range(0, time, size)]
    parts = [
        attend(queries[:, start:end], keys[:, :, :end], values[:, :, :end], visible[:, start:end, :end])
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    return jnp.concatenate(parts, axis=1)


@jax.custom_vjp
def _plain(queries: Array, keys: Array, values: Array, visible: Array) -> Array:
    q = _by_key_head(queries * queries.shape[-1] ** -0.5, keys.shape[1])
    out = jnp.einsum("bkqs,bksd->bkqd", _plain_weights(q, keys, visible).astype(values.dtype), values)
    return _by_query_head(out, queries.shape)


def _plain_weights(q: Array, keys: Array, visible: Array) -> Array:
    return _weights(jnp.einsum("bkqd,bksd->bkqs", q, keys, preferred_element_type=jnp.float32), visible)


def _plain_fwd(queries: Array, keys: Array, values: Array, visible: Array) -> tuple[Array, Any]:
    out = _plain(queries, keys, values, visible)
    return out, (queries, keys, values, visible, out)


def _plain_bwd(residuals: Any, cotangent: Array) -> tuple[Array, Array, Array, None]:
    """With w the weights (computed again, never kept) and dw = do v^T: ds = w (dw - <do, o>), dq = ds k / sqrt(d),
    dk = ds^T q / sqrt(d), dv = w^T do (FlashAttention, arXiv 2205.14135, appendix B)."""
    queries, keys, values, visible, out = residuals
    kv, scale = keys.shape[1], queries.shape[-1] ** -0.5
    q, do, o = (_by_key_head(x, kv) for x in (queries * scale, cotangent, out))
    weights = _plain_weights(q, keys, visible)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dv = dot("bkqs,bkqd->bksd", weights.astype(values.dtype), do).astype(values.dtype)
    along = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=-1, keepdims=True)
    ds = (weights * (dot("bkqd,bksd->bkqs", do, values) - along)).astype(keys.dtype)
    dk = dot("bkqs,bkqd->bksd", ds, q).astype(keys.dtype)
    dq = _by_query_head(dot("bkqs,bksd->bkqd", ds, keys) * scale, queries.shape)
    return dq.astype(queries.dtype), dk, dv, None


_plain.defvjp(_plain_fwd, _plain_bwd)


def attend_cached(
    queries: Float[Array, "b t h d"], keys: kv_cache.Keys, values: kv_cache.Values, visible: Bool[Array, "b t s"]
) -> Float[Array, "b t h d"]:
    """The same over a cache: keys are transposed, and a stretch of columns that no row sees costs nothing."""
    q = _by_key_head(queries * queries.shape[-1] ** -0.5, keys[0].shape[1])
    bounds = list(itertools.pairwise(kv_cache.starts(values)))
    seen = [jnp.any(visible[:, :, a:b]) for a, b in bounds]

    def score(k: Array) -> Array:
        return jnp.einsum("bkqd,bkds->bkqs", q, k, preferred_element_type=jnp.float32)

    scores = [_where_seen(s, score, k) for s, k in zip(seen, keys, strict=True)]
    weights = _weights(jnp.concatenate(scores, axis=-1), visible).astype(values[0].dtype)

    def combine(v: Array, w: Array) -> Array:
        return jnp.einsum("bkqs,bksd->bkqd", w, v)

    parts = [_where_seen(s, combine, v, weights[..., a:b]) for s, v, (a, b) in zip(seen, values, bounds, strict=True)]
    return _by_query_head(functools.reduce(jnp.add, parts), queries.shape)


def _where_seen(seen: Array, product: Callable[..., Array], *args: Array) -> Array:
    """The product where some row sees the stretch, otherwise zeros. A GPU would wait for the host at each condition."""
    if jax.default_backend() == "gpu":
        return product(*args)
    out = jax.eval_shape(product, *args)
    return jax.lax.cond(seen, product, lambda *_: jnp.zeros(out.shape, out.dtype), *args)


def _by_key_head(queries: Array, kv: int) -> Array:
    """Head-major, the queries of one key head side by side: both products are plain batched matmuls."""
    b, t, h, d = queries.shape
    return queries.reshape(b, t, kv, h // kv, d).transpose(0, 2, 3, 1, 4).reshape(b, kv, (h // kv) * t, d)


def _by_query_head(out: Array, shape: tuple[int, ...]) -> Array:
    b, t, h, d = shape
    kv = out.shape[1]
    return out.reshape(b, kv, h // kv, t, d).transpose(0, 3, 1, 2, 4).reshape(b, t, h, d)


def _weights(scores: Array, visible: Array) -> Array:
    """Softmax over the visible columns: [b kv (queries of a key head x t) s]."""
    b, kv, q, s = scores.shape
    t = visible.shape[1]
    scores = jnp.where(visible[:, None, None], scores.reshape(b, kv, q // t, t, s), _MASKED)
    return jax.nn.softmax(scores, axis=-1).reshape(b, kv, q, s)


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
        cache: tuple[kv_cache.Keys, kv_cache.Values, Integer[Array, "b"]] | None = None,
    ) -> tuple[Float[Array, "b t d"], tuple[Any, Any]]:
        """Returns the output and this layer's keys and values (the updated cache, where one was given)."""
        b, t, _ = x.shape
        flat = x.reshape(b * t, -1)  # two dimensions: a weight's gradient is then one matmul without a transpose
        split = lambda w: (flat @ w[...].astype(x.dtype)).reshape(b, t, -1, self.head_dim)  # noqa: E731
        q, k, v = rotate(self.q_norm(split(self.q)), rope), rotate(self.k_norm(split(self.k)), rope), split(self.v)
        if cache is None:
            kv = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
            flash = self.implementation == "flash"
            y = attend(q, *kv, visible, "flash") if flash else attend_causal(q, *kv, visible)
        else:
            keys, values, column = cache
            kv = kv_cache.write(keys, values, k, v, column)
            y = attend_cached(q, *kv, visible)
        return (y.reshape(b * t, -1) @ self.o[...].astype(x.dtype)).reshape(b, t, -1), kv
