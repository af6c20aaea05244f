"""Arguments that all layers of one forward share: what they are told of the tokens, and the kernels of this mesh."""

from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Integer, SegmentIds
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models.architecture import ModelConfig, Rows
from jaxrl_llm.models.attention import kv_cache
from jaxrl_llm.models.attention.choice import choose_attention, hides_columns
from jaxrl_llm.models.gate import Gate

_EXACT = ByName(
    {"cpu": "jaxrl_llm.models.exact.tiles:Tiles", "tpu": "jaxrl_llm.models.exact.exact_kernels:KernelTiles"}
)
_OF_SOME = ByName({"check_kernels": "jaxrl_llm.models.attention.layer_kinds"})
_UNROLLED = {"cpu": 8, "gpu": 48}  # layers; for more, compile time matters


def in_a_loop(config: ModelConfig, mesh: Mesh | None, layers: int) -> bool:
    """Return whether so many equal layers are trained in a loop of XLA or one after the other.

    A loop stacks what the backward needs and copies each layer's weights out of their stack, which costs more than
    compiling the layers: a step of 1 B parameters takes 1.07 (dense) and 1.18 times (a mixture) as long on an H200.
    Remat of blocks stacks little. Without the loop XLA keeps weights that were gathered from the devices of a mesh, and
    TPUs compile many layers for minutes.
    """
    platform = sharding.platform(mesh)
    unrolled_for = {"cpu": ("none",), "gpu": ("none", "dots") if sharding.shards("embed", mesh) == 1 else ()}
    return config.remat not in unrolled_for.get(platform, ()) or layers > _UNROLLED[platform]


class Kernels(NamedTuple):
    """The choices that depend on a platform, made once for all layers.

    attention: of whole rows, plain or flash.
    cache: how keys and values of a decode loop lie in memory.
    exact: operations (`Tiles`) that give a token the same bits in every arrangement of a batch; None: not asked for.
    """

    mesh: Mesh | None
    platform: str
    attention: str
    cache: kv_cache.Layout
    exact: Any = None

    @classmethod
    def of(cls, config: ModelConfig, mesh: Mesh | None) -> "Kernels":
        """Raises ValueError: flash attention, exact numerics or a mesh that splits rows are set and have no kernel."""
        platform, exact = sharding.platform(mesh), None
        if config.numerics == "exact":
            if platform not in _EXACT:
                raise ValueError(
                    f"model.numerics=exact has kernels for {' and '.join(_EXACT)}, and this is {platform}; set "
                    "model.numerics=fast"
                )
            exact = _EXACT[platform].of(config)
        if exact or config.kv_lora_rank or config.linear_num_value_heads or hides_columns(config):
            _OF_SOME["check_kernels"](config, sharding.shards("time", mesh))
        layout = kv_cache.layout_of(config, platform)
        return cls(mesh, platform, choose_attention(config, platform), layout, exact)


class Seen(NamedTuple):
    """Arguments that are equal for all layers; axes are the logical axes of b and t, rows as in `Model.apply`.

    Where layers differ, `views` has what each kind of them sees (`layer_views.Views`).
    """

    rotation: tuple[Array, Array]
    visible: Bool[Array, "b t s"]  # not read where axes split t
    segment_ids: SegmentIds
    axes: tuple[str, str | None]
    rows: Rows
    kernels: Kernels
    gate: Gate
    views: Any = None
    window: Integer[Array, "b t"] | None = None  # columns that a token sees at most; `visible` leaves out the others
