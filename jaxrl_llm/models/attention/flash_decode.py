"""Attention of the next token of every row over a cache on a GPU: a kernel of JAX reads each row as far as it is
filled. A prompt that rows share lies before their caches and is read once, by plain products; the two parts are joined
by their partition sums.

Source: FlashAttention, arXiv 2205.14135, section 3.1, for the joining; the kernel is
jax.experimental.pallas.ops.gpu.decode_attention, whose programs share the columns of a row. JAX 0.12 deprecates it
with its Triton backend; where a later JAX has none, caches are read whole (`kv_cache.layout_of`).
"""

import functools
import importlib
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer
from jaxrl_llm.models.attention import kv_cache

_BLOCK = 128  # columns that a program of the kernel takes at a time
_OUT = -1e30  # the score of a column that is not seen


def _kernel() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(kv_cache.KERNEL)


class _Part(NamedTuple):
    """Attention over some columns: its normalised result, the sum of exp(score - top), and the largest score."""

    out: Float[Array, "b kv g d"]
    total: Float[Array, "b kv g"]
    top: Float[Array, "b kv g"]


def attend_filled(
    queries: Float[Array, "b 1 h d"],
    keys: kv_cache.Keys,
    values: kv_cache.Values,
    visible: Bool[Array, "b 1 s"],
    filled: Integer[Array, "b"],
    mesh: Mesh | None = None,
    interpret: bool = False,
) -> Float[Array, "b 1 h d"]:
    """softmax(q k^T / sqrt(d)) v over the first `filled` columns of a row's cache, the last of the stretches, and over
    what it sees of the prompt before it, if there are two.

    Keys are laid out as values (`kv_cache.FILLED`). interpret: run the kernel as plain JAX, on any platform.
    """
    (b, _, _, d), kv = queries.shape, keys[-1].shape[1]
    q = queries.reshape(b, kv, -1, d)
    parts = [_of_caches(q, keys[-1], values[-1], filled, mesh, interpret)]
    if len(keys) == 2:
        parts.append(_of_prompts(q, keys[0], values[0], visible[:, 0, : keys[0].shape[2]]))
    return _joined(parts).astype(queries.dtype).reshape(queries.shape)


def _of_caches(q: Array, keys: Array, values: Array, filled: Array, mesh: Mesh | None, interpret: bool) -> _Part:
    def run(q: Array, keys: Array, values: Array, filled: Array) -> _Part:
        b, kv, g, d = q.shape
        q, keys, values = (x.reshape(b * kv, -1, d) for x in (q, keys, values))
        out, (total, top) = _kernel().mqa(
            q,
            keys,
            values,
            kv_seq_len=jnp.repeat(filled, kv),
            block_k=_BLOCK,
            k_splits=keys.shape[1] // kv_cache.FILLED.multiple,
            return_residuals=True,
            interpret=interpret,
        )
        return _Part(out.reshape(b, kv, g, d), total.reshape(b, kv, g), top.reshape(b, kv, g))

    if mesh is None or mesh.size == 1:
        return run(q, keys, values, filled)
    axes = ("rows", "kv_heads", None, None)
    specs = [sharding.spec(axes[: x.ndim], x.shape, mesh) for x in (q, keys, values, filled, q[..., 0])]
    out = _Part(specs[0], specs[4], specs[4])  # pyright: ignore
    split = jax.shard_map(run, mesh=mesh, in_specs=tuple(specs[:4]), out_specs=out, check_vma=False)
    return split(q, keys, values, filled)


def _of_prompts(q: Array, keys: Array, values: Array, visible: Array) -> _Part:
    """Prompt i is that of rows i b / p to (i + 1) b / p - 1."""
    (b, kv, g, d), p = q.shape, len(keys)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = dot("pnkgd,pksd->pnkgs", q.reshape(p, -1, kv, g, d), keys).reshape(b, kv, g, -1) * d**-0.5
    scores = jnp.where(visible[:, None, None], scores, _OUT)
    top = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - top[..., None])
    total = jnp.sum(weights, axis=-1)
    out = dot("pnkgs,pksd->pnkgd", weights.astype(values.dtype).reshape(p, -1, kv, g, scores.shape[-1]), values)
    return _Part(out.reshape(b, kv, g, d) / total[..., None], total, top)


def _joined(parts: list[_Part]) -> Array:
    top = functools.reduce(jnp.maximum, [part.top for part in parts])
    weights = [part.total * jnp.exp(part.top - top) for part in parts]
    of_parts = [part.out.astype(jnp.float32) * w[..., None] for part, w in zip(parts, weights, strict=True)]
    return functools.reduce(jnp.add, of_parts) / functools.reduce(jnp.add, weights)[..., None]
