"""Which attention runs, by the platform, the mesh and the config; the kernels are imported where they run."""

from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.ground import machine, sharding
from jaxrl_llm.models.architecture import ModelConfig

BLOCK = 128  # queries and columns: the splash kernel takes multiples of the TPU's lanes
RESULT = "what splash attention gives its backward"
_LONG = 512  # tokens: eight blocks of `attend_blocks`
_CORES = 2  # blocks follow one another, so that more cores multiply whole rows sooner


def choose_attention(config: ModelConfig, platform: str) -> str:
    """plain or flash on this platform; `auto` is flash for bfloat16 where there is a kernel for this head size. Raises
    ValueError if flash is set and there is none."""
    implementation, head_dim, dtype = config.attention_implementation, config.head_dim, config.dtype
    if hides_columns(config):
        return "plain"
    on_gpu = platform == "gpu" and head_dim % 8 == 0 and head_dim <= 128 and dtype == "bfloat16"
    fits = on_gpu or (platform == "tpu" and head_dim % 64 == 0)
    if implementation == "flash" and not fits:
        raise ValueError(
            f"attention_implementation='flash' needs a GPU (bfloat16, head_dim a multiple of 8 up to 128) or a TPU "
            f"(head_dim a multiple of 64), this is {platform} with {dtype} and head_dim={head_dim}; set it to 'auto'"
        )
    if implementation == "auto":
        return "flash" if fits and dtype == "bfloat16" else "plain"
    return implementation


def hides_columns(config: ModelConfig) -> bool:
    """Return whether some layer has a window or sinks, for which only plain attention of whole rows has a form."""
    return bool(config.sliding_window or config.attention_sinks)


def kept_of_attention(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A policy of jax.checkpoint: keep the result of flash attention and the sums of its softmax, for which a backward
    would compute the forward again."""
    return primitive.name == "dot_product_attention_fwd_wrapper" or parameters.get("name") == RESULT


def time_multiple(config: ModelConfig, mesh: Mesh | None) -> int:
    """Rows whose length is a multiple of this are split evenly over devices, and no attention has to pad them."""
    shards, platform = sharding.shards("time", mesh), sharding.platform(mesh)
    if shards == 1:
        return 1
    of_chunk = {"gpu": 2, "tpu": BLOCK} if choose_attention(config, platform) == "flash" else {}
    return 2 * shards * of_chunk.get(platform, 1)


def skips_blocks(time: int, mesh: Mesh | None) -> bool:
    """Return whether rows that long, of answers to one prompt, are attended in blocks: on one CPU device of few cores.
    A GPU would wait for the host at each block, and rows that are spread over devices have no block in common."""
    on_cpu = sharding.platform(mesh) == "cpu" and (mesh is None or mesh.size == 1)
    return on_cpu and time >= _LONG and len(machine.usable_cores()) <= _CORES
