"""Every field of a config: what is checked, what configs/base.py and the documentation list."""

import dataclasses
import typing

from jaxrl_llm import objectives
from jaxrl_llm.ground.declared import Block, Declaration, declaration, declarations
from jaxrl_llm.run.blocks import Settings, TaskConfig

# The dataclass of every block. Only `objective` has none: its fields are the recipes' hyper-parameters.
BLOCKS: dict[str, type[Block]] = {"task": TaskConfig} | {
    name: kind
    for name, kind in typing.get_type_hints(Settings).items()
    if isinstance(kind, type) and issubclass(kind, Block)
}

# The model of a run that names no other, where it differs from the defaults of ModelConfig, which are Qwen3's.
_TINY = dict(
    vocab_size=None,
    num_hidden_layers=3,
    hidden_size=64,
    intermediate_size=128,
    head_dim=16,
    num_experts=8,
    moe_intermediate_size=32,
    rope_theta=10_000.0,
)


def declared_fields() -> dict[str, Declaration]:
    """{"block.field": declaration} of every field, block by block; the default is a run's."""
    out = {name: declaration(Settings, name) for name in ("seed", "steps")}
    for block in (field.name for field in dataclasses.fields(Settings)):
        own = declarations(BLOCKS[block]) if block in BLOCKS else {}
        if block == "model":
            own = {name: one._replace(default=_TINY.get(name, one.default)) for name, one in own.items()}
            own = {"pretrained": declaration(Settings, "pretrained")} | own
        elif block == "objective":
            own = {"name": declaration(Settings, "objective_name")} | objectives.fields()
        out |= {f"{block}.{name}": one for name, one in own.items()}
    return out
