"""Rows that stay on their devices, and what goes between them: all micro-batches of a minibatch in one exchange.

A rollout has its rows spread over the devices, a layout has the rows of every micro-batch spread over them, and over
the axis `context` their time; which device has what another needs is decided by a permutation that is drawn anew for
every epoch. The parts go around in a ring of all D devices, and each takes (or puts) what it needs out of the part that
it holds: D - 1 sends of one part, the bytes of an all-gather, but no device ever holds more than two parts. One device
takes the same elements without any of this, so the numbers are the same.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Int
from jaxrl_llm.models import no_record

__all__ = ["bring", "bring_back"]


def bring(tree: Any, index: Int[Array, "m r t"], mesh: Mesh) -> Any:
    """The elements at `index` (row * time + column, -1 = padding) out of arrays [b t] and [l b t x].

    Returns:
      Arrays [m r t] and [l m r t x]; padding is 0, False or "no record". b is spread over the devices, and so are r and
      t together.
    """

    def run(index: Array, parts: Any) -> Any:
        def pick(source: Array, parts: Any, picked: Any) -> Any:
            return jax.tree.map(lambda part, old: _picked(part, index, source, old), parts, picked)

        return _around(pick, parts, jax.tree.map(lambda x: _blank(x, index.shape), parts), mesh)

    specs = (_laid_out(mesh, 2), jax.tree.map(lambda x: _rows(mesh, x.ndim), tree))
    out = jax.tree.map(lambda x: _laid_out(mesh, x.ndim), tree)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)(jnp.asarray(index), tree)


def bring_back(into: Any, tree: Any, index: Int[Array, "m r t"], mesh: Mesh) -> Any:
    """Arrays [b t] and [l b t x] with those of `tree`, [m r t] and [l m r t x], written at `index`; -1 is nowhere."""

    def run(index: Array, into: Any, parts: Any) -> Any:
        own = lax.axis_index(_axes(mesh))

        def write(source: Array, moving: tuple[Array, Any], into: Any) -> Any:
            index, parts = moving
            return jax.tree.map(lambda old, part: _written(old, part, index, own), into, parts)

        return _around(write, (index, parts), into, mesh)

    rows = jax.tree.map(lambda x: _rows(mesh, x.ndim), into)
    specs = (_laid_out(mesh, 2), rows, jax.tree.map(lambda x: _laid_out(mesh, x.ndim), into))
    run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    return run(jnp.asarray(index), into, tree)


def _around(step: Callable[[Array, Any, Any], Any], moving: Any, carry: Any, mesh: Mesh) -> Any:
    """step(source, part, carry) for the part of every device, this one's own first."""
    axes, count = _axes(mesh), sharding.row_shards(mesh)
    own = lax.axis_index(axes)
    to_the_one_before = [(i, (i - 1) % count) for i in range(count)]

    def turn(n: Array, state: Any) -> Any:
        moving, carry = state
        moving = jax.tree.map(lambda x: lax.ppermute(x, axes, to_the_one_before), moving)
        return moving, step((own + n) % count, moving, carry)

    # XLA:CPU runs what is independent at once: a loop's sends beside another collective can take its last thread.
    unroll = sharding.platform(mesh) == "cpu"
    return lax.fori_loop(1, count, turn, (moving, step(own, moving, carry)), unroll=unroll)[1]


def _picked(part: Array, index: Array, source: Array, old: Array) -> Array:
    """`old` with what of `index` lies in the part of the device `source`."""
    size = _size(part)
    local = index - source * size
    here, place = (local >= 0) & (local < size), jnp.clip(local, 0, size - 1)
    if part.ndim == 2:
        return jnp.where(here, part.ravel()[place], old)
    return jnp.where(here[None, ..., None], part.reshape(part.shape[0], size, -1)[:, place], old)


def _written(old: Array, part: Array, index: Array, own: Array) -> Array:
    """The own part `old` with what of `index` lies in it."""
    size = _size(old)
    local = (index - own * size).ravel()
    place = jnp.where((local >= 0) & (local < size), local, size)  # beyond the end, and dropped
    if old.ndim == 2:
        return old.ravel().at[place].set(part.ravel(), mode="drop").reshape(old.shape)
    flat, new = (x.reshape(x.shape[0], -1, x.shape[-1]) for x in (old, part))
    return flat.at[:, place].set(new, mode="drop").reshape(old.shape)


def _blank(x: Array, shape: tuple[int, ...]) -> Array:
    """Padding of an array that is laid out: 0, False or "no record"."""
    if x.ndim == 2:
        return jnp.zeros(shape, x.dtype)
    empty = no_record(x) if jnp.issubdtype(x.dtype, jnp.integer) else 0
    return jnp.full((x.shape[0], *shape, x.shape[-1]), empty, x.dtype)


def _size(x: Array) -> int:
    """Places of an array [b t] or [l b t x]."""
    return x.shape[0] * x.shape[1] if x.ndim == 2 else x.shape[1] * x.shape[2]


def _axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(sharding.rows(mesh).spec[0])


def _rows(mesh: Mesh, rank: int) -> PartitionSpec:
    """Of an array of a rollout, [b t] or [l b t x]."""
    return PartitionSpec(*([None] * (rank == 4)), _axes(mesh))


def _laid_out(mesh: Mesh, rank: int) -> PartitionSpec:
    """Of one of this rank that is laid out, [m r t] or [l m r t x]."""
    return PartitionSpec(*([None] * (1 + (rank == 4))), *sharding.micro_batch(mesh).spec)
