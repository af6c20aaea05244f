"""A minibatch as its `Layout` cuts it: micro-batches out of arrays of a rollout, results written back, sums over them.

On one device micro-batches are cut out of the rollout one after the other. On a mesh the rows of a rollout stay on
their devices, and so do the places of a micro-batch (rows, and over the axis `context` time). Which device has what
another needs is decided by a permutation that every epoch draws anew, so once a minibatch the parts of all D devices go
around in a ring, and each device takes (or puts) what it needs out of the part that it holds: D - 1 sends of one part,
the bytes of an all-gather, but no device ever holds more than two parts. The elements are those that one device takes,
so the numbers are the same.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Int, Shaped
from jaxrl_llm.models import no_record
from jaxrl_llm.training.layout import Layout


class MicroBatches:
    """A tree of arrays of a rollout, [b t], [b t x] and [l b t x], as a layout cuts them; rows of a micro-batch are
    padded to a length that `multiple` divides."""

    def __init__(self, arrays: Any, layout: Layout, mesh: Any = None, multiple: int = 1):
        self.layout = layout if multiple == 1 else padded(layout, multiple)
        self._arrays, self._mesh, self._brought = arrays, mesh, None
        if _spread(arrays, self.layout, mesh):
            self._brought = bring(jax.tree.leaves(arrays), self.layout.index, mesh)

    def __getitem__(self, micro: Any) -> Any:
        """As `take`."""
        if self._brought is None:
            return take(self._arrays, self.layout, micro)
        there = [x[:, micro] if x.ndim == 5 else x[micro] for x in self._brought]
        return jax.tree.unflatten(jax.tree.structure(self._arrays), there)

    def all_of(self, x: Shaped[Array, "b t"]) -> Shaped[Array, "m r places"]:
        """Another array of the rollout, as all micro-batches take it."""
        return MicroBatches(x, self.layout, self._mesh)[:]

    def fill(self, into: Any, of: Callable[[Array], Any]) -> Any:
        """Arrays of the rollout with of(i) in the places of every micro-batch i in use, as `put`."""
        layout = self.layout
        if not _spread(into, layout, self._mesh):
            return lax.fori_loop(0, layout.used, lambda i, into: put(into, of(i), layout, i), into)
        arrays, structure = jax.tree.flatten(into)

        def body(i: Array, filled: list[Array]) -> list[Array]:
            return [
                lax.dynamic_update_index_in_dim(old, new.astype(old.dtype), i, 0 if old.ndim == 3 else 1)
                for old, new in zip(filled, jax.tree.leaves(of(i)), strict=True)
            ]

        filled = lax.fori_loop(0, layout.used, body, [_blank(x, layout.index.shape) for x in arrays])
        return jax.tree.unflatten(structure, bring_back(arrays, filled, layout.index, self._mesh))

    def accumulate(self, one: Callable[[Any], Any]) -> Any:
        """(totals, metrics, gradients), summed over the micro-batches in use.

        Args:
          one: number of a micro-batch -> ((loss, (totals, metrics)), gradients).
        """
        if len(self.layout.index) == 1:
            (_, (totals, metrics)), gradients = one(0)
            return totals, metrics, gradients
        (_, (totals, metrics)), gradients = jax.eval_shape(one, 0)
        zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
        add = functools.partial(jax.tree.map, jnp.add)

        def body(i: Array, carry: Any) -> Any:
            (_, (totals, metrics)), gradients = one(i)
            return add(carry[0], totals), M.combine(carry[1], metrics), add(carry[2], gradients)

        return lax.fori_loop(0, self.layout.used, body, (zeros(totals), M.identity(metrics), zeros(gradients)))


def padded(layout: Layout, multiple: int) -> Layout:
    """Rows with as much padding as makes their length a multiple of this."""
    room = ((0, 0), (0, 0), (0, -layout.index.shape[2] % multiple))
    index = jnp.pad(layout.index, room, constant_values=-1)
    return layout.replace(index=index, segment_ids=jnp.pad(layout.segment_ids, room))


def _spread(tree: Any, layout: Layout, mesh: Mesh | None) -> bool:
    """Whether the devices have places of their own: they divide the rows of the rollout, and rows and time of every
    micro-batch."""
    rows = {x.shape[1 if x.ndim == 4 else 0] for x in jax.tree.leaves(tree)}
    cut = [(n, "rows") for n in rows] + list(zip(layout.index.shape[1:], sharding.MICRO_BATCH, strict=True))
    return sharding.shards("rows", mesh) > 1 and not any(n % sharding.shards(axis, mesh) for n, axis in cut)


def take(tree: Any, layout: Layout, micro: Any) -> Any:
    """The places of one micro-batch (or of all, micro = slice(None)) out of arrays [b t], [b t x] and [l b t x].

    Padding is 0, False, -1 in [b t x] or "no record".
    """
    index = layout.index[micro]
    return jax.tree.map(lambda x: _picked(x, index, _blank(x, index.shape)), tree)


def put(into: Any, new: Any, layout: Layout, micro: Any) -> Any:
    """Write the places of one micro-batch back into arrays [b t] and [l b t x] of the rollout."""
    index = layout.index[micro]
    return jax.tree.map(lambda old, new: _written(old, new, index), into, new)


def bring(tree: Any, index: Int[Array | np.ndarray, "m r t"], mesh: Mesh) -> Any:
    """What `take` takes of all micro-batches, [m r t], [m r t x] and [l m r t x], where b is spread over the devices,
    and so are r and t together."""
    of_rows, of_places = _specs(mesh)

    def run(index: Array, parts: Any) -> Any:
        def pick(source: Array, parts: Any, picked: Any) -> Any:
            return jax.tree.map(lambda part, old: _picked(part, _local(index, source, part), old), parts, picked)

        return _around(pick, parts, jax.tree.map(lambda x: _blank(x, index.shape), parts), mesh)

    specs, out = (of_places(2), jax.tree.map(of_rows, tree)), jax.tree.map(of_places, tree)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)(jnp.asarray(index), tree)


def bring_back(into: Any, tree: Any, index: Int[Array | np.ndarray, "m r t"], mesh: Mesh) -> Any:
    """What `put` writes of all micro-batches, spread as `bring` has them."""
    of_rows, of_places = _specs(mesh)

    def run(index: Array, into: Any, parts: Any) -> Any:
        own = lax.axis_index(_row_axes(mesh))

        def write(source: Array, moving: tuple[Array, Any], into: Any) -> Any:
            index, parts = moving
            return jax.tree.map(lambda old, part: _written(old, part, _local(index, own, old)), into, parts)

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
    return index - device * _size(part)


def _picked(part: Array, index: Any, old: Array) -> Array:
    """`old`, where `index` is in range the elements of `part` there."""
    size = _size(part)
    here, place = (index >= 0) & (index < size), jnp.clip(index, 0, size - 1)
    if part.ndim == 2:
        return jnp.where(here, part.ravel()[place], old)
    if part.ndim == 3:
        return jnp.where(here[..., None], part.reshape(size, -1)[place], old)
    flat = part.reshape(part.shape[0], size, part.shape[-1])
    return jnp.where(here[None, ..., None], flat[:, place], old)


def _written(old: Array, new: Array, index: Any) -> Array:
    """`old` with the elements of `new` where `index` is in range."""
    size, new = _size(old), new.astype(old.dtype)
    place = jnp.where((index >= 0) & (index < size), index, size).ravel()  # beyond the end, and dropped
    if old.ndim == 2:
        return old.ravel().at[place].set(new.ravel(), mode="drop").reshape(old.shape)
    flat, new = (x.reshape(x.shape[0], -1, x.shape[-1]) for x in (old, new))
    return flat.at[:, place].set(new, mode="drop").reshape(old.shape)


def _blank(x: Array, shape: tuple[int, ...]) -> Array:
    """An array that is laid out, all padding."""
    if x.ndim == 2:
        return jnp.zeros(shape, x.dtype)
    if x.ndim == 3:
        return jnp.full((*shape, x.shape[-1]), -1, x.dtype)
    empty = no_record(x) if jnp.issubdtype(x.dtype, jnp.integer) else 0
    return jnp.full((x.shape[0], *shape, x.shape[-1]), empty, x.dtype)


def _size(x: Array) -> int:
    """Places of an array [b t], [b t x] or [l b t x]."""
    return x.shape[1] * x.shape[2] if x.ndim == 4 else x.shape[0] * x.shape[1]
