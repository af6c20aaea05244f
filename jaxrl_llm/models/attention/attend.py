"""The core of attention, softmax(q k^T / sqrt(d)) v: over a batch, with a hand-written backward, and over a cache."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Bool, Float
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models.attention import kv_cache
from jaxrl_llm.models.layers import whole

_SINKS = ByName({"gradient": "jaxrl_llm.models.attention.sinks", "softmax_beside": "jaxrl_llm.models.attention.sinks"})
_CHUNK, _CHUNKS = 64, 4  # a chunk has at least 64 queries, and a row at most 4 chunks
MASKED = -1e30  # finite, so that the softmax of a fully masked row (padding) is uniform and not NaN


@jax.custom_vjp
def attend(
    queries: Float[Array, "b t h d"],
    keys: Float[Array, "b kv s d"],
    values: Float[Array, "b kv s v"],
    visible: Bool[Array, "b t s"],
    sinks: Float[Array, " h"] | None = None,
) -> Float[Array, "b t h v"]:
    """softmax(q k^T / sqrt(d)) v over the visible columns; scores and softmax in float32.

    sinks: of each head the score of one more column, whose value is 0 (gpt-oss, arXiv 2508.10925).
    """
    q = by_key_head(queries * queries.shape[-1] ** -0.5, keys.shape[1])
    out = jnp.einsum("bkqs,bksd->bkqd", _attend_weights(q, keys, visible, sinks).astype(values.dtype), values)
    return by_query_head(out, queries.shape)


def attend_causal(
    queries: Float[Array, "b t h d"],
    keys: Float[Array, "b kv t d"],
    values: Float[Array, "b kv t v"],
    visible: Bool[Array, "b t t"],
    sinks: Float[Array, " h"] | None = None,
) -> Float[Array, "b t h v"]:
    """`attend` where no query sees a later column: chunks of queries, each over the columns up to its end."""
    time = queries.shape[1]
    size = max(_CHUNK, -(-time // _CHUNKS))
    ends = [min(start + size, time) for start in range(0, time, size)]
    parts = [
        attend(queries[:, start:end], keys[:, :, :end], values[:, :, :end], visible[:, start:end, :end], sinks)
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    return jnp.concatenate(parts, axis=1)


def _attend_weights(q: Array, keys: Array, visible: Array, sinks: Array | None) -> Array:
    return _weights(jnp.einsum("bkqd,bksd->bkqs", q, keys, preferred_element_type=jnp.float32), visible, sinks)


def _attend_fwd(queries: Array, keys: Array, values: Array, visible: Array, sinks: Array | None) -> tuple[Array, Any]:
    out = attend(queries, keys, values, visible, sinks)
    return out, (queries, keys, values, visible, sinks, out)


def _attend_bwd(residuals: Any, cotangent: Array) -> tuple[Array, Array, Array, None, Array | None]:
    """With w the weights (computed again, never kept) and dw = do v^T: ds = w (dw - <do, o>), dq = ds k / sqrt(d),
    dk = ds^T q / sqrt(d), dv = w^T do (FlashAttention, arXiv 2205.14135, appendix B); the value of a sink is 0."""
    queries, keys, values, visible, sinks, out = residuals
    kv, scale = keys.shape[1], queries.shape[-1] ** -0.5
    q, do, o = (by_key_head(x, kv) for x in (queries * scale, cotangent, out))
    weights = _attend_weights(q, keys, visible, sinks)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dv = dot("bkqs,bkqd->bksd", weights.astype(values.dtype), do).astype(values.dtype)
    along = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=-1, keepdims=True)
    ds = (weights * (dot("bkqd,bksd->bkqs", do, values) - along)).astype(keys.dtype)
    dk = dot("bkqs,bkqd->bksd", ds, q).astype(keys.dtype)
    dq = by_query_head(dot("bkqs,bksd->bkqd", ds, keys) * scale, queries.shape)
    d_sinks = None if sinks is None else _SINKS["gradient"](weights, along, sinks)
    return dq.astype(queries.dtype), dk, dv, None, d_sinks


attend.defvjp(_attend_fwd, _attend_bwd)


def attend_cached(
    queries: Float[Array, "b t h d"],
    keys: Sequence[Any],
    values: Sequence[Any],
    visible: Bool[Array, "b t s"],
    platform: str = "cpu",
    layout: kv_cache.Layout = kv_cache.STRETCHES,
    sinks: Float[Array, " h"] | None = None,
    of_values: Float[Array, "b t h v"] | None = None,
) -> Float[Array, "b t h v"]:
    """`attend` over a cache: a stretch of columns that no row sees is skipped, except on a GPU, which would wait for
    the host at each condition. Each row of a stretch with fewer rows is shared by consecutive queries, and is read
    once. An array of keys or values may be an `OfLayer`. of_values: queries whose products with values are added to
    the scores, for values that are keys too."""
    q = by_key_head(queries * queries.shape[-1] ** -0.5, keys[0].shape[1])
    bounds = list(itertools.pairwise(kv_cache.starts(values)))
    seen = [jnp.any(visible[:, :, a:b]) for a, b in bounds]
    of_keys = "bkqx,bkxy->bkqy" if layout.key_columns == -1 else "bkqx,bkyx->bkqy"
    score = functools.partial(jnp.einsum, of_keys, preferred_element_type=jnp.float32)
    dot = functools.partial(jnp.einsum, "bkqx,bkxy->bkqy")

    def product(seen: Array, dot: Callable[..., Array], left: Array, stretch: Any) -> Array:
        of_rows = functools.partial(_product, dot)
        if platform == "gpu":
            return of_rows(left, stretch)
        out = jax.eval_shape(of_rows, left, stretch)
        return jax.lax.cond(seen, of_rows, lambda *_: jnp.zeros(out.shape, out.dtype), left, stretch)

    scores = [product(s, score, q, k) for s, k in zip(seen, keys, strict=True)]
    if of_values is not None:
        score = functools.partial(jnp.einsum, "bkqx,bkyx->bkqy", preferred_element_type=jnp.float32)
        q = by_key_head(of_values, keys[0].shape[1])
        scores = [one + product(s, score, q, v) for one, s, v in zip(scores, seen, values, strict=True)]
    weights = _weights(jnp.concatenate(scores, axis=-1), visible, sinks).astype(queries.dtype)
    lefts = [weights[..., a:b] for a, b in bounds]
    if layout.stacked:
        lefts = jax.lax.optimization_barrier(lefts)  # or XLA:TPU copies all weights for each condition
    parts = [product(s, dot, left, v) for s, v, left in zip(seen, values, lefts, strict=True)]
    return by_query_head(functools.reduce(jnp.add, parts), queries.shape)


def _product(dot: Callable[..., Array], left: Array, stretch: Any) -> Array:
    """left [b kv q x] times a stretch of p rows of the cache."""
    stretch = whole(stretch)
    (b, kv, q, x), p = left.shape, len(stretch)
    together = left.reshape(p, b // p, kv, q, x).swapaxes(1, 2).reshape(p, kv, -1, x)
    return dot(together, stretch).reshape(p, kv, b // p, q, -1).swapaxes(1, 2).reshape(b, kv, q, -1)


def by_key_head(queries: Array, kv: int) -> Array:
    """Head-major, the queries of one key head side by side: both products are plain batched matmuls."""
    b, t, h, d = queries.shape
    return queries.reshape(b, t, kv, h // kv, d).transpose(0, 2, 3, 1, 4).reshape(b, kv, (h // kv) * t, d)


def by_query_head(out: Array, shape: tuple[int, ...]) -> Array:
    b, t, h, _ = shape
    kv, d = out.shape[1], out.shape[-1]
    return out.reshape(b, kv, h // kv, t, d).transpose(0, 3, 1, 2, 4).reshape(b, t, h, d)


def _weights(scores: Array, visible: Array, sinks: Array | None) -> Array:
    """Softmax over the visible columns and the sink, which is left out: [b kv (queries of a key head x t) s]."""
    b, kv, q, s = scores.shape
    t = visible.shape[1]
    scores = jnp.where(visible[:, None, None], scores.reshape(b, kv, q // t, t, s), MASKED)
    softmax = jax.nn.softmax(scores, axis=-1) if sinks is None else _SINKS["softmax_beside"](scores, sinks)
    return softmax.reshape(b, kv, q, s)
