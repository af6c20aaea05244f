"""LoRA (Hu et al., arXiv 2106.09685): W + (alpha / r) A B with W frozen, A [m r] drawn and B [r n] zero at first.

Adapters are a tree of their own: the part of the parameters' tree that holds the target matrices, with {"a", "b"} in
place of each, stacked over layers and experts in the same way. `attach` puts them beside the frozen weights for
training; `merge` adds them to the weights for rollouts and exports, so that decoding costs nothing extra.
"""

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxrl_llm.ground import ranges, sharding
from jaxrl_llm.ground.array_typing import Array, Key, Params
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.declared import Block, declared
from jaxrl_llm.models.layers import LowRank, whole
from jaxrl_llm.models.transformer import Model

_KERNELS = ByName({"in_order": "jaxrl_llm.models.exact.tiles"})
TARGETS = {
    "attention": tuple(
        ("attention", name)
        for name in (*"qkvo", "q_a", "q_b", "kv_a", "kv_b", "out_gate", "out", *(f"in_{of}" for of in "qkvzba"))
    ),
    "mlp": tuple(("mlp", *of, name) for of in ((), ("shared",)) for name in ("gate", "up", "down")),
    "router": (("mlp", "router"),),
}


@dataclasses.dataclass(frozen=True)
class LoRAConfig(Block, prefix="lora."):
    """Low-rank adapters on a frozen base, which is the start of the run and the reference."""

    rank: int = declared(0, "0 trains every parameter", least=0)
    alpha: float = declared(16.0, "the change of a weight is scaled by alpha / rank", above=0)
    targets: str = declared("attention,mlp", "some of attention, mlp (dense layers and experts), router")

    def check(self) -> None:
        for target in self._targets:
            ranges.one_of("lora.targets", target, TARGETS)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def _targets(self) -> list[str]:
        return [target.strip() for target in self.targets.split(",")]

    def holds(self, path: tuple[str, ...]) -> bool:
        """Return whether the matrix at this path of the parameters' tree is adapted."""
        return any(path[1:] == target for name in self._targets for target in TARGETS[name])


def init_adapters(config: LoRAConfig, model: Model, key: Key) -> dict[str, Any]:
    """float32 adapters on the model's mesh: A normal with standard deviation 1 / sqrt(m), B zero."""
    axes = adapter_axes(config, model)

    def make(key: Key) -> dict[str, Any]:
        def pair(path: tuple[str, ...], leaf: Any) -> dict[str, Array]:
            *lead, m, n = leaf.shape
            own = jax.random.fold_in(key, zlib.crc32("/".join(path).encode()))  # the same whatever else is a target
            a = jax.random.normal(own, (*lead, m, config.rank)) * m**-0.5
            return {"a": a, "b": jnp.zeros((*lead, config.rank, n))}

        return _select(config, jax.eval_shape(model.init, key), pair)

    places = None if model.mesh is None else sharding.shardings(axes, jax.eval_shape(make, key), model.mesh)
    return jax.jit(make, out_shardings=places)(key)


def adapter_axes(config: LoRAConfig, model: Model) -> dict[str, Any]:
    """The logical axes of every adapter: its weight's, with the rank for one side. ValueError if there is no target."""
    if not config.rank:
        raise ValueError("lora.rank=0 has no adapters; set it to at least 1")

    def pair(_: tuple[str, ...], axes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        return {"a": (*axes[:-1], "rank"), "b": (*axes[:-2], "rank", axes[-1])}

    if not (axes := _select(config, model.axes(), pair)):
        raise ValueError(f"lora.targets={config.targets!r} name no matrix of this model; add attention or mlp")
    return axes


def attach(params: Any, adapters: Any, scale: float) -> Any:
    """Parameters that `Model.apply` takes, with every target as a `LowRank`, the weight and its change apart. Gradients
    of the adapters then cost no gradient of the weights, except for experts and the router, which are multiplied whole.

    Args:
      params: the whole tree, or one weight [*lead m n].
      adapters: the tree of `init_adapters`, or for one weight {"a": [*lead m r], "b": [*lead r n]}.
      scale: alpha / rank, by which the change is multiplied.
    """
    if set(adapters) == {"a", "b"}:
        return LowRank(params, adapters["a"] * scale, adapters["b"])
    return {key: attach(x, adapters[key], scale) if key in adapters else x for key, x in params.items()}


def merge(params: Params, adapters: Any, scale: float) -> dict[str, Any]:
    """Plain parameters with the changes added, in the types of the weights."""
    return jax.tree.map(whole, attach(params, adapters, scale), is_leaf=lambda x: isinstance(x, LowRank))


def merged(model: Model, params: Params, adapters: Any, scale: float) -> dict[str, Any]:
    """`merge` by one program, on the model's mesh.

    Returns:
      Parameters as `Model.init` has them. Weights that are no target are the given arrays, not copies.
    """
    flat = flatten_dict(dict(params))
    pairs = flatten_dict(adapters, is_leaf=lambda _, x: set(x) == {"a", "b"})
    pairs = {path: pair for path, pair in pairs.items() if path in flat}
    return unflatten_dict(flat | _sums(model, {path: flat[path] for path in pairs}, pairs, scale))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _sums(model: Model, weights: dict[Any, Array], pairs: dict[Any, Any], scale: float) -> dict[Any, Array]:
    axes: dict[Any, Any] = flatten_dict(model.axes())
    added = _KERNELS["in_order"] if model.config.numerics == "exact" else whole
    return {
        path: sharding.constrain(added(attach(weight, pairs[path], scale)), axes[path], model.mesh)
        for path, weight in weights.items()
    }


def _select(config: LoRAConfig, tree: Any, make: Any) -> dict[str, Any]:
    """make(path, leaf) for every target of a tree like the parameters'; branches without one are left out."""
    leaves = flatten_dict(tree)
    return unflatten_dict({path: make(path, leaf) for path, leaf in leaves.items() if config.holds(path)})
