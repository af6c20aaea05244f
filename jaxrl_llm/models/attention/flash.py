"""Flash attention (arXiv 2205.14135) through libraries, which also differentiate it: cuDNN on GPU (jax.nn), the splash
kernel on TPU (jax.experimental.pallas)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float, SegmentIds
from jaxrl_llm.models.architecture import Rows
from jaxrl_llm.models.attention.choice import BLOCK, RESULT
from jaxrl_llm.models.attention.context_parallel import Place, attend_halves, attend_spread

_LARGEST = 512  # block that the splash kernel is given


def flash_attention(
    queries: Float[Array, "b t h d"],
    keys: Float[Array, "b kv t d"],
    values: Float[Array, "b kv t d"],
    segment_ids: SegmentIds,
    mesh: Mesh | None = None,
    axes: tuple[str, str | None] = sharding.MICRO_BATCH,
    rows: Rows = "packed",
) -> Float[Array, "b t h d"]:
    """softmax(q k^T / sqrt(d)) v, causal and inside a segment; the result at padding (segment 0) has no meaning.
    axes: the logical axes of b and t; rows: as in `Model.apply`."""
    if sharding.platform(mesh) == "gpu":
        return _cudnn(queries, keys, values, segment_ids, axes, mesh, rows)
    scaled = queries * queries.shape[-1] ** -0.5
    return attend_spread(_splash, scaled, keys, values, segment_ids, axes, mesh, multiple=BLOCK)


def _cudnn(
    queries: Array,
    keys: Array,
    values: Array,
    segment_ids: Array,
    axes: tuple[str, str | None],
    mesh: Mesh | None,
    rows: Rows,
) -> Array:
    """Rows are padded to an even number of tokens, because with a mask the kernel's backward refuses an odd one.

    Causality is a flag, so that blocks above the diagonal are not computed. Segments are a mask [b 1 t t] in memory,
    which every head reads: with it the kernel reached 156 TFLOP/s both ways on an H100. Rows of one segment have none,
    since causality keeps padding behind it from all tokens. Where time is spread no flag fits a part of the queries:
    the mask says both, and 1.5 times as many pairs are computed.
    """
    kernel = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")

    def whole(_: Place, q: Array, k: Array, v: Array, ids: Array) -> Array:
        same = None if rows == "padded" else ids[:, None, :, None] == ids[:, None, None, :]
        return kernel(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), mask=same, is_causal=True)

    def masked(q: Array, k: Array, v: Array, visible: Array) -> Array:
        return kernel(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), mask=visible[:, None])

    local = attend_halves(masked) if sharding.shards(axes[1], mesh) > 1 else whole
    return attend_spread(local, queries, keys, values, segment_ids, axes, mesh, multiple=2)


def _splash(
    place: Place, queries: Array, keys: Array, values: Array, segment_ids: Array, interpret: bool = False
) -> Array:
    """Attention of one device's queries, of which every chunk is a multiple of BLOCK. interpret: as plain JAX."""
    time = keys.shape[2]
    block = max(size for size in range(BLOCK, _LARGEST + 1, BLOCK) if place.chunk(time) % size == 0)
    sides = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes = splash.BlockSizes(**dict.fromkeys(sides, block))
    mask = splash.CausalMask((time, time))
    mask.q_sequence = place.order(time)  # of all devices, one after the other
    heads = splash.MultiHeadMask([mask] * queries.shape[2])
    of_all: Any = splash.make_splash_mha(
        heads,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=place.shards,
        residual_checkpoint_name=RESULT,
        interpret=interpret,
    )
    attend = jax.vmap(jax.tree.map(place.own, of_all))
    ids = splash.SegmentIds(place.of_queries(segment_ids), segment_ids)
    return jnp.swapaxes(attend(jnp.swapaxes(queries, 1, 2), keys, values, ids), 1, 2)
