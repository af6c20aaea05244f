"""Context parallelism: attention over rows whose tokens are spread over c devices (the mesh axis `context`).

Queries stay spread. Keys and values, of which grouped-query attention has few heads, are gathered from the devices of a
row; their gradients are summed and scattered back. Under a causal mask late queries see more columns than early ones,
so a row is cut into 2 c chunks, and for the attention alone device i is sent the queries of the chunks i and
2 c - 1 - i: all devices have the same number of pairs to compute.

Source: Llama 3, arXiv 2407.21783, section 3.3.2.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float, SegmentIds


@dataclasses.dataclass(frozen=True)
class Place:
    """Which queries of a row a device has: all (axis None), or the chunks i = `index` and 2 c - 1 - i of c `shards`."""

    axis: str | None
    shards: int

    @property
    def index(self) -> Any:
        return lax.axis_index(self.axis) if self.axis else 0

    def chunk(self, time: int) -> int:
        return time // (2 * self.shards) if self.axis else time

    def starts(self, time: int) -> list[Any]:
        """The first query of each chunk of this device."""
        n = self.chunk(time)
        return [self.index * n, time - (self.index + 1) * n] if self.axis else [0]

    def order(self, time: int) -> np.ndarray:
        """The queries of all devices, one device after the other."""
        chunks = np.arange(time, dtype=np.int32).reshape(-1, self.chunk(time))
        return np.stack([chunks, chunks[::-1]], axis=1)[: self.shards].ravel() if self.axis else chunks.ravel()

    def own(self, of_all: Array) -> Array:
        """This device's part of an array in that order: [t], or blocks [_ blocks _]."""
        axis = min(1, of_all.ndim - 1)
        size = of_all.shape[axis] // self.shards
        return lax.dynamic_slice_in_dim(of_all, self.index * size, size, axis) if self.axis else of_all

    def of_queries(self, row: Array) -> Array:
        """[b t] for all tokens -> [b q] for the queries of this device."""
        n = self.chunk(row.shape[1])
        return jnp.concatenate([lax.dynamic_slice_in_dim(row, at, n, 1) for at in self.starts(row.shape[1])], axis=1)

    def gathered(self, x: Array) -> Array:
        """The [b kv t d] of all devices that share the row."""
        return lax.all_gather(x, self.axis, axis=2, tiled=True) if self.axis else x

    def balanced(self, queries: Array) -> Array:
        """Exchanges consecutive queries [b q h d], the chunks 2 i and 2 i + 1, for the chunks i and 2 c - 1 - i."""
        if not self.axis:
            return queries
        halves = enumerate(jnp.split(queries, 2, axis=1))
        return self._by_parity([lax.ppermute(half, self.axis, self._moves(parity)) for parity, half in halves])

    def restored(self, out: Array) -> Array:
        """The inverse of `balanced`."""
        if not self.axis:
            return out
        halves = enumerate(jnp.split(self._by_parity(jnp.split(out, 2, axis=1)), 2, axis=1))
        back = [[(to, source) for source, to in self._moves(parity)] for parity in range(2)]
        return jnp.concatenate([lax.ppermute(half, self.axis, back[parity]) for parity, half in halves], axis=1)

    def _moves(self, parity: int) -> list[tuple[int, int]]:
        """(from, to) of the chunks 2 i + parity; a device gets one of each parity, since i + (2 c - 1 - i) is odd."""
        chunks = range(parity, 2 * self.shards, 2)
        return [(chunk // 2, min(chunk, 2 * self.shards - 1 - chunk)) for chunk in chunks]

    def _by_parity(self, halves: Sequence[Array]) -> Array:
        """(even chunk, odd chunk) <-> (earlier chunk, later chunk): the earlier one has the number of the device."""
        odd = self.index % 2 == 1
        return jnp.concatenate([jnp.where(odd, b, a) for a, b in (halves, halves[::-1])], axis=1)


# (place, queries [b q h d], all keys and values [b kv t d], segment ids [b t]) -> [b q h d]
Local = Callable[[Place, Array, Array, Array, Array], Array]


def attend_spread(
    local: Local,
    queries: Float[Array, "b t h d"],
    keys: Float[Array, "b kv t d"],
    values: Float[Array, "b kv t d"],
    segment_ids: SegmentIds,
    axes: tuple[str, str | None],
    mesh: Mesh | None,
    multiple: int = 1,
) -> Float[Array, "b t h d"]:
    """`local` on every device's rows, heads and queries; axes: the logical axes of b and t.

    Every chunk of a row is padded to a `multiple` of tokens. The backward sums over mesh axes that split neither rows
    nor heads nor time, since shard_map cannot see that they agree.
    """
    time, shards = queries.shape[1], sharding.shards(axes[1], mesh)
    multiple *= 2 * shards if shards > 1 else 1
    fill = -time % multiple

    def pad(x: Array, axis: int) -> Array:
        return jnp.pad(x, [(0, fill if a == axis else 0) for a in range(x.ndim)]) if fill else x

    queries, keys, values, segment_ids = pad(queries, 1), pad(keys, 2), pad(values, 2), pad(segment_ids, 1)
    if mesh is None or mesh.size == 1:
        return local(Place(None, 1), queries, keys, values, segment_ids)[:, :time]
    # Queries are cut by head as their keys are.
    row, head, split, _ = sharding.spec((axes[0], "kv_heads", axes[1], None), keys.shape, mesh)
    place = Place(split if shards > 1 else None, shards)

    def run(queries: Array, keys: Array, values: Array, segment_ids: Array) -> Array:
        keys, values = place.gathered(keys), place.gathered(values)
        return place.restored(local(place, place.balanced(queries), keys, values, segment_ids))

    by_query, by_key = PartitionSpec(row, split, head), PartitionSpec(row, head, split)
    specs = (by_query, by_key, by_key, PartitionSpec(row))
    run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=by_query, check_vma=False)
    return run(queries, keys, values, segment_ids)[:, :time]


def attend_halves(attend: Callable[[Array, Array, Array, Array], Array]) -> Local:
    """`attend` (queries, keys, values, visible [b q s]) for each of a device's two chunks; the earlier one never sees
    the second half of the columns."""

    def local(place: Place, queries: Array, keys: Array, values: Array, segment_ids: Array) -> Array:
        time, out = keys.shape[2], []
        ids = jnp.split(place.of_queries(segment_ids), 2, axis=1)
        chunks = zip(place.starts(time), (time // 2, time), jnp.split(queries, 2, axis=1), ids, strict=True)
        for start, end, q, q_ids in chunks:
            columns = segment_ids[:, :end]
            causal = (start + jnp.arange(q_ids.shape[1]))[:, None] >= jnp.arange(end)[None]
            visible = causal[None] & (q_ids[:, :, None] == columns[:, None, :])  # padding sees padding, unread
            out.append(attend(q, keys[:, :, :end], values[:, :, :end], visible))
        return jnp.concatenate(out, axis=1)

    return local
