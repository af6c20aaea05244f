"""A policy as one value: what it is sampled, scored and evaluated with."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.models.lora import attach, merged
from jaxrl_llm.models.transformer import Model

__all__ = ["Policy", "with_value_head"]


class Policy(flax.struct.PyTreeNode):
    """Parameters that are trained, and those that are frozen beneath them. A reference policy and a critic are such
    values too.

    trained: all parameters, or the adapters of LoRA; with "value_head" where the transformer has one.
    frozen: the parameters that adapters change; None if all parameters are trained.
    scale: of the adapters, alpha / rank.
    """

    trained: Any
    frozen: Any = None
    scale: float = flax.struct.field(pytree_node=False, default=1.0)

    @property
    def value_head(self) -> Any:
        return self.trained.get("value_head")

    def whole(self) -> dict[str, Any]:
        """The parameters of a forward with gradients: adapters stay beside their weights, a value head stays in."""
        if self.frozen is None:
            return self.trained
        others = {name: x for name, x in self.trained.items() if name not in self.frozen}
        return attach(self.frozen, self.trained, self.scale) | others

    def plain(self, model: Model) -> dict[str, Any]:
        """The parameters that are sampled from and exported: adapters are merged by one program, a value head is left
        out."""
        if self.frozen is not None:
            return merged(model, self.frozen, self.trained, self.scale)
        return {name: x for name, x in self.trained.items() if name != "value_head"}

    def copy(self) -> "Policy":
        """The policy with a copy of what is trained, which an update would overwrite."""
        return self.replace(trained=jax.tree.map(lambda x: x.copy(), self.trained))


def with_value_head(params: Any, hidden_size: int) -> Any:
    """Parameters with a linear value head that starts at 0."""
    head = {"kernel": jnp.zeros(hidden_size, jnp.float32), "bias": jnp.zeros((), jnp.float32)}
    return dict(params) | {"value_head": head}
