"""Parameters on their way from the layout of training to that of rollouts, cut by cut."""

import itertools
import operator
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.ground.array_typing import Params
from jaxrl_llm.models import Model
from jaxrl_llm.rollout.placement import places

_Cuts = tuple[tuple[str, ...], ...]  # for each dimension the axes of a mesh that cut it, the coarsest first


def move(params: Params, source: Model, target: Model) -> dict[str, Any]:
    """Parameters from their places on one mesh to those on another, inside a jitted function."""

    def one(x: Any, here: NamedSharding, there: NamedSharding) -> jax.Array:
        for place in (here, *route(here, there, x.ndim), there):
            x = jax.lax.with_sharding_constraint(x, place)
        return x

    return jax.tree.map(one, dict(params), places(source, params), places(target, params))


def route(here: NamedSharding, there: NamedSharding, ndim: int) -> list[NamedSharding]:
    """The shardings to pass through between two of one array, so that every step is one collective or a slice.

    XLA moves one cut from a dimension to another by an all-to-all; if several change at once, it gathers the whole
    array on every device. Both meshes are cut into common axes, of which a step moves, adds or gathers one; there are
    none for 2 x 3 and 3 x 2 devices, and so nothing to pass through.
    """
    devices: Any = here.mesh.devices
    bounds = [list(itertools.accumulate(x.mesh.axis_sizes, operator.mul, initial=1)) for x in (here, there)]
    points = sorted({point for one in bounds for point in one})
    if any(high % low for low, high in itertools.pairwise(points)):
        return []
    sizes = [high // low for low, high in itertools.pairwise(points)]
    names = tuple(f"from_{low}" for low in points[:-1])
    mesh = Mesh(devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))

    def cuts(x: NamedSharding, bound: list[int]) -> _Cuts:
        common: dict[str | None, tuple[str, ...]] = {None: ()}
        for axis, (low, high) in zip(x.mesh.axis_names, itertools.pairwise(bound), strict=True):
            common[axis] = tuple(f"from_{point}" for point in points if low <= point < high)
        entries = [one if isinstance(one, tuple) else (one,) for one in (*x.spec, *[None] * (ndim - len(x.spec)))]
        return tuple(tuple(name for axis in entry for name in common[axis]) for entry in entries)

    now, goal = cuts(here, bounds[0]), cuts(there, bounds[1])
    steps = []
    while now != goal:
        now = _next(now, goal)
        steps.append(NamedSharding(mesh, PartitionSpec(*(cut or None for cut in now))))
    return steps[:-1]


def _next(now: _Cuts, goal: _Cuts) -> _Cuts:
    """One step towards the goal; what makes an array smaller comes before what makes it larger."""
    pairs = list(enumerate(zip(now, goal, strict=True)))
    missing = {to[len(cut)]: place for place, (cut, to) in pairs if cut != to and cut == to[: len(cut)]}
    wrong = {cut[-1]: place for place, (cut, to) in pairs if cut != to[: len(cut)]}

    def changed(remove: str = "", add: str = "") -> _Cuts:
        kept = [tuple(name for name in cut if name != remove) for cut in now]
        if add:
            kept[missing[add]] += (add,)
        return tuple(kept)

    for name in missing:
        if not any(name in cut for cut in now):  # every device has all: it takes its part
            return changed(add=name)
    for name in missing:
        if name in wrong:
            return changed(remove=name, add=name)
    unwanted = [name for name in wrong if not any(name in to for to in goal)]
    return changed(remove=(unwanted or list(wrong))[0])
