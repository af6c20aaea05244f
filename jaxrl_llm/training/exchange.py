"""Micro-batches on a mesh, whose devices tell one another what each needs.

The rows of a rollout stay on their devices, and so do the places of a micro-batch (rows, and over the axis `context`
time). Which device has what another needs is decided by a permutation that every epoch draws anew, so once a minibatch
the parts of all D devices go around in a ring, and each device takes (or puts) what it needs out of the part that it
holds: D - 1 sends of one part, the bytes of an all-gather, but no device ever holds more than two parts. The elements
are those that one device takes, so the numbers are the same.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Int
from jaxrl_llm.training.indexing import blank, picked, size_of, written


def bring(tree: Any, index: Int[Array | np.ndarray, "m r t"], mesh: Mesh) -> Any:
    """Return what `take` takes of all micro-batches, [m r t], [m r t x] and [l m r t x]; b is spread over the devices,
    and so are r and t together."""
    of_rows, of_places = _specs(mesh)

    def run(index: Array, parts: Any) -> Any:
        def pick(source: Array, parts: Any, held: Any) -> Any:
            return jax.tree.map(lambda part, old: picked(part, _local(index, source, part), old), parts, held)

        return _around(pick, parts, jax.tree.map(lambda x: blank(x, index.shape), parts), mesh)

    specs, out = (of_places(2), jax.tree.map(of_rows, tree)), jax.tree.map(of_places, tree)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)(jnp.asarray(index), tree)


def bring_back(into: Any, tree: Any, index: Int[Array | np.ndarray, "m r t"], mesh: Mesh) -> Any:
    """Return what `put` writes of all micro-batches, spread as `bring` has them."""
    of_rows, of_places = _specs(mesh)

    def run(index: Array, into: Any, parts: Any) -> Any:
        own = lax.axis_index(_row_axes(mesh))

        def write(source: Array, moving: tuple[Array, Any], into: Any) -> Any:
            index, parts = moving
            return jax.tree.map(lambda old, part: written(old, part, _local(index, own, old)), into, parts)

        return _around(write, (index, parts), into, mesh)

    rows = jax.tree.map(of_rows, into)
    specs = (of_places(2), rows, jax.tree.map(of_places, into))
    run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    return run(jnp.asarray(index), into, tree)


def _row_axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(sharding.rows(mesh).spec[0])  # pyright: ignore


def _specs(mesh: Mesh) -> tuple[Callable[[Any], PartitionSpec], Callable[[Any], PartitionSpec]]:
    """Specs of arrays of a rollout, [b t], [b t x] or [l b t x], and of what is laid out of them, [m r t], [m r t x] or
    [l m r t x], as functions of the rollout's array, or of its rank."""

    def after(free: int, spec: Any) -> Any:
        return lambda x: PartitionSpec(*[None] * (free + (getattr(x, "ndim", x) == 4)), *spec)

    return after(0, sharding.rows(mesh).spec), after(1, sharding.micro_batch(mesh).spec)


def _around(step: Callable[[Array, Any, Any], Any], moving: Any, carry: Any, mesh: Mesh) -> Any:
    """step(source, part, carry) for the part of every device, this one's own first."""
    axes, count = _row_axes(mesh), sharding.shards("rows", mesh)
    own = lax.axis_index(axes)
    to_the_one_before = [(i, (i - 1) % count) for i in range(count)]

    def turn(n: Array, state: Any) -> Any:
        moving, carry = state
        moving = jax.tree.map(lambda x: lax.ppermute(x, axes, to_the_one_before), moving)
        return moving, step((own + n) % count, moving, carry)

    # XLA:CPU runs what is independent at once: a loop's sends beside another collective can take its last thread.
    unroll = sharding.platform(mesh) == "cpu"
    return lax.fori_loop(1, count, turn, (moving, step(own, moving, carry)), unroll=unroll)[1]


def _local(index: Array, device: Array, part: Array) -> Array:
    """`index` counted from the start of the part that a device has; what lies in another's is out of range."""
    return index - device * size_of(part)
