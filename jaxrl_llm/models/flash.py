"""Flash attention through a library: cuDNN on GPU (jax.nn), the splash kernel on TPU (jax.experimental.pallas).

Source: FlashAttention, arXiv 2205.14135. Both kernels are differentiated by their library.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh

from jaxrl_llm import sharding
from jaxrl_llm.array_typing import Array, Float, SegmentIds
from jaxrl_llm.models.config import ModelConfig

__all__ = ["choose_attention", "flash_attention"]

_BLOCK = 128  # queries and columns: the splash kernel takes multiples of the TPU's lanes
_LARGEST = 512  # block that the splash kernel is given


def choose_attention(config: ModelConfig, platform: str) -> str:
    """plain or flash on this platform; `auto` is flash for bfloat16 where there is a kernel for this head size.

    Raises:
      ValueError: flash is set where there is no kernel for it.
    """
    implementation, head_dim, dtype = config.attention_implementation, config.head_dim, config.dtype
    fits = {
        "gpu": head_dim % 8 == 0 and head_dim <= 128 and dtype == "bfloat16",
        "tpu": head_dim % 64 == 0,
    }.get(platform, False)
    if implementation == "flash" and not fits:
        raise ValueError(
            f"attention_implementation='flash' needs a GPU (bfloat16, head_dim a multiple of 8 up to 128) or a TPU "
            f"(head_dim a multiple of 64), this is {platform} with {dtype} and head_dim={head_dim}; set it to 'auto'"
        )
    if implementation == "auto":
        return "flash" if fits and dtype == "bfloat16" else "plain"
    return implementation


def flash_attention(
    queries: Float[Array, "b t h d"],
    keys: Float[Array, "b kv t d"],
    values: Float[Array, "b kv t d"],
    segment_ids: SegmentIds,
    mesh: Mesh | None = None,
) -> Float[Array, "b t h d"]:
    """softmax(q k^T / sqrt(d)) v, causal and inside a segment; the result at padding (segment 0) has no meaning."""
    time = queries.shape[1]
    multiple, kernel = (2, _cudnn) if sharding.platform(mesh) == "gpu" else (_BLOCK, _splash)

    def widen(x: Array, axis: int) -> Array:
        return jnp.pad(x, [(0, -time % multiple if a == axis else 0) for a in range(x.ndim)])

    out = kernel(widen(queries, 1), widen(keys, 2), widen(values, 2), widen(segment_ids, 1), mesh)
    return out[:, :time]


def _cudnn(queries: Array, keys: Array, values: Array, segment_ids: Array, mesh: Mesh | None) -> Array:
    """Padded to an even number of tokens: with a mask, the kernel's backward refuses an odd one.

    Causality by flag, so that blocks above the diagonal are not computed; segments by a mask [b 1 t t] in memory.
    """
    del mesh  # the kernel knows how to be partitioned
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    keys, values = jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2)
    return jax.nn.dot_product_attention(queries, keys, values, mask=same, is_causal=True, implementation="cudnn")


def _splash(
    queries: Array, keys: Array, values: Array, segment_ids: Array, mesh: Mesh | None, interpret: bool = False
) -> Array:
    """Padded to a multiple of _BLOCK tokens; on a mesh each device runs its own rows and heads. interpret: on any
    platform.

    The backward sums over mesh axes that split neither rows nor heads, since shard_map cannot see that they agree.
    """
    kernel = functools.partial(_kernel, interpret=interpret)
    if mesh is not None and mesh.size > 1:
        heads = ("rows", "kv_heads", None, None)
        parts = (heads, keys), (heads, keys), (heads, values), (("rows", None), segment_ids)
        specs = tuple(sharding.spec(axes, x.shape, mesh) for axes, x in parts)  # heads are cut as their key heads are
        kernel = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    scaled = jnp.swapaxes(queries * queries.shape[-1] ** -0.5, 1, 2)
    return jnp.swapaxes(kernel(scaled, keys, values, segment_ids), 1, 2)


def _kernel(queries: Array, keys: Array, values: Array, segment_ids: Array, interpret: bool) -> Array:
    """[b h t d] of one device; t is a multiple of _BLOCK."""
    _, heads, time, _ = queries.shape
    block = max(size for size in range(_BLOCK, _LARGEST + 1, _BLOCK) if time % size == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = splash.MultiHeadMask([splash.CausalMask((time, time))] * heads)
    attend: Any = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)

    def of_row(q: Array, k: Array, v: Array, ids: Array) -> Array:
        return attend(q, k, v, splash.SegmentIds(ids, ids))

    return jax.vmap(of_row)(queries, keys, values, segment_ids)
