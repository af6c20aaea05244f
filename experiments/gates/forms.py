"""The forms of a gate as numbers beside its weights: one compiled program serves them all.

Compiling is what a tiny study spends most of its time on. `AnyGate` computes every form of `FORMS` and takes the one
that a buffer names; `begun` makes the parameters of a form, with or without a shared expert, out of the same draw.
tests/experiments/test_gates.py compares each form with the package's own gate.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground.array_typing import Array, Float, Integer
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.gate import Gate
from jaxrl_llm.models.routing import Routing

GROUPS, KEPT = 8, 4  # as DeepSeek-V3, arXiv 2412.19437, section 4.2
# Each form by fields of the package's own gate, where they are not its defaults.
FORMS: dict[str, dict[str, Any]] = {
    "softmax, renormalised": {},
    "softmax, as it is": {"normalise": False},
    "sigmoid, bias": {"scoring": "sigmoid", "selection_bias": True},
    "sigmoid, bias, groups": {"scoring": "sigmoid", "selection_bias": True, "groups": GROUPS, "kept_groups": KEPT},
}
CONTROL = {"sigmoid": {"scoring": "sigmoid"}}  # its load is as uneven as a softmax leaves it


@dataclasses.dataclass(frozen=True)
class AnyGate(Gate):
    """A gate whose form is a buffer: 1 where scores are sigmoids, weights normalised, groups chosen, else 0.

    Each form has a bias, which is 0 where the form has none.
    """

    form: Any = None  # [3], bound inside a forward

    def shapes(self, size: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """Shapes of the gate's weights with the buffer."""
        return super().shapes(size) | {"router_form": ((3,), ("router",))}

    def scores(self, logits: Float[Array, "*n e"]) -> Float[Array, "*n e"]:
        """Return the scores of all experts by the form."""
        return jnp.where(self.form[0] > 0, jax.nn.sigmoid(logits), jax.nn.softmax(logits, axis=-1))

    def ranks(self, logits: Float[Array, "*n e"], weights: Mapping[str, Array]) -> Float[Array, "*n e"]:
        """Return numbers whose k largest are chosen, by the form."""
        grouped = super().ranks(logits, weights)
        free = dataclasses.replace(self, groups=1).ranks(logits, weights) if self.groups > 1 else grouped
        return jnp.where(self.form[2] > 0, grouped, free)

    def choose(
        self,
        logits: Float[Array, "*n e"],
        weights: Mapping[str, Array],
        replay: Routing | None = None,
        choice: Integer[Array, "*n k"] | None = None,
    ) -> tuple[Routing, Float[Array, "*n k"]]:
        """Return the routing and weights of the form that the buffer names."""
        bound = dataclasses.replace(self, form=jax.lax.stop_gradient(weights["router_form"]))
        return Gate.choose(bound, logits, weights, replay, choice)

    def weights(self, logits: Float[Array, "*n e"], experts: Integer[Array, "*n k"]) -> Float[Array, "*n k"]:
        """Return the weights of given experts by the form."""
        kept = jnp.take_along_axis(self.scores(logits), experts, axis=-1)
        return jnp.where(self.form[1] > 0, kept / jnp.sum(kept, axis=-1, keepdims=True), kept)


@dataclasses.dataclass(frozen=True)
class AnyGateConfig(ModelConfig, prefix="model."):
    """The shape of a model whose layers have `AnyGate`."""

    @property
    def gate(self) -> AnyGate:
        """The gate of every layer, whose groups a form may leave unread."""
        own = super().gate
        return AnyGate(own.num_experts, own.num_chosen, selection_bias=True, groups=GROUPS, kept_groups=KEPT)


def buffer(form: str) -> np.ndarray:
    """The numbers of `AnyGate.form`."""
    gate = dataclasses.replace(Gate(0, 0), **(FORMS | CONTROL)[form])
    return np.array([gate.scoring == "sigmoid", gate.normalise, gate.groups > 1], np.float32)


def begun(params: Any, form: str, shared: bool) -> Any:
    """Host parameters of a form, from fresh ones with a shared expert.

    With a shared expert every routed expert lacks its last unit; without one the shared expert is 0. The weights of
    such a unit are 0, so they get no gradient and stay 0, and the model is one without the unit.
    """
    params = jax.device_get(params)
    layers = {name: np.array(x) for name, x in params["moe"]["mlp"].items() if name != "shared"}
    layers["router_form"][:] = buffer(form)
    if shared:
        for name, unit in (("gate", np.s_[..., -1]), ("up", np.s_[..., -1]), ("down", np.s_[..., -1, :])):
            layers[name][unit] = 0
    of_shared = params["moe"]["mlp"]["shared"]
    layers["shared"] = of_shared if shared else jax.tree.map(np.zeros_like, of_shared)
    return params | {"moe": params["moe"] | {"mlp": layers}}
