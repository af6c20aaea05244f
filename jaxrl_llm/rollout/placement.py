"""Placement of a rollout's parameters; parameter_moves.py has their way there from the layout of training.

Training slices parameters (fsdp); decoding would have to gather the slices at every step, and wants whole matrices, or
heads and widths (tensor) that stay where they are. Both meshes have the same devices in the same order, so that arrays
of both meet in one program.
"""

import functools
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Params
from jaxrl_llm.models import Model
from jaxrl_llm.rollout.rollout import Rollout


def places(model: Model, params: Params) -> dict[str, Any]:
    """The sharding of each parameter on the model's mesh, stacked (`Model.init`) or as of `Model.unstack`;
    parameters that are not the model's (a value head) are whole on every device."""
    mesh: Any = model.mesh

    def of(axes: Any, tree: Any) -> Any:
        if not isinstance(tree, tuple):
            return sharding.shardings(axes, tree, mesh)
        parts = [jax.tree.map(lambda x, a: a[len(a) - x.ndim :], part, axes) for part in tree]  # of stacks or of layers
        return tuple(sharding.shardings(*pair, mesh) for pair in zip(parts, tree, strict=True))

    axes = model.axes()
    whole = jax.tree.map(lambda _: sharding.replicated(mesh), dict(params))
    return {name: of(axes[name], tree) if name in axes else whole[name] for name, tree in params.items()}


def placed_shapes(model: Model, shapes: Params) -> Params:
    """Abstract parameters with the sharding that each has on the model's mesh."""
    if model.mesh is None:
        return shapes
    return jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), shapes, places(model, shapes)
    )


def in_place(model: Model, params: Params) -> bool:
    """Return whether the parameters lie where the model computes; abstract ones without a sharding do."""
    if model.mesh is None:
        return True

    def same(to: jax.sharding.Sharding, x: Any) -> bool:
        return x.sharding is None or x.sharding.is_equivalent_to(to, x.ndim)

    own = {name: params[name] for name in model.axes()}
    return all(jax.tree.leaves(jax.tree.map(same, places(model, own), own)))


@functools.partial(jax.jit, static_argnums=0)
def spread_rows(mesh: Mesh | None, rollout: Rollout) -> Rollout:
    """Spread the rows over another mesh, in a program of its own: one with kernels may know a single mesh."""
    return sharding.constrain_rollout(rollout, mesh)
