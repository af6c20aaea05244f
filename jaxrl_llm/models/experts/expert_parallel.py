"""Expert parallelism: tokens are sent to the devices that hold their experts, and the results are sent back.

Inside shard_map over the mesh axis of the experts every device holds its own tokens and E / p of the E experts (p
devices). In a round every device sends at most `capacity` (token, expert) pairs to every other, an all-to-all of
p x capacity rows, computes what it received and sends the results back. Rounds repeat until all pairs are done: no
token is dropped whatever the load, and the buffers stay near the mean load. One round is usually enough.

The backward is written by hand: it goes through the same rounds, sends states and cotangents together and recomputes
the experts' inner activations, so that a layer keeps nothing but its arguments.

Source: GShard, arXiv 2006.16668, section 3.2, with rounds instead of dropped tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.ground.array_typing import Array, Float, Integer
from jaxrl_llm.models.experts.expert_blocks import group_by_expert

SLACK = 1.5  # size of a buffer relative to an even load; a higher load takes another round

# (x, experts, gates, weights) -> y on one device; an expert index past the last marks an empty row
Local = Callable[[Array, Array, Array, Sequence[Array]], Array]


@dataclasses.dataclass(frozen=True)
class Axes:
    """experts: the mesh axis that spreads them; mesh: all axes, whose devices agree on the number of rounds.

    ragged: send the pairs alone, not their whole buffer. TPUs can; XLA:CPU has no ragged all-to-all, and on GPU its
    one-shot lowering corrupts gradients.
    """

    experts: str
    mesh: tuple[str, ...]
    ragged: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def move_tokens(
    local: Local,
    axes: Axes,
    x: Float[Array, "n d"],
    experts: Integer[Array, "n k"],
    gates: Float[Array, "n k"],
    weights: Sequence[Array],
) -> Float[Array, "n d"]:
    """y of these tokens with all experts, where `local` computes with the weights that each device holds."""
    pairs = _Pairs(axes, experts, gates, weights[0].shape[0])

    def one_round(r: Array, y: Array) -> Array:
        rows, expert, gate = pairs.to_experts(r, x)
        (z,) = pairs.to_tokens(r, local(rows, expert, gate, weights))
        return y + jnp.sum(z, axis=1, dtype=jnp.float32)

    return pairs.in_rounds(one_round, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype)


def _move_tokens_fwd(local: Local, axes: Axes, *args: Any) -> tuple[Array, Any]:
    return move_tokens(local, axes, *args), args


def _move_tokens_bwd(local: Local, axes: Axes, residuals: Any, dy: Array) -> tuple[Any, ...]:
    x, experts, gates, weights = residuals
    pairs = _Pairs(axes, experts, gates, weights[0].shape[0])

    def one_round(r: Array, totals: Any) -> Any:
        rows, cotangents, expert, gate = pairs.to_experts(r, x, dy)
        _, pull = jax.vjp(lambda rows, gate, weights: local(rows, expert, gate, weights), rows, gate, weights)
        d_rows, d_gate, d_weights = pull(cotangents)
        d_rows, d_gate = pairs.to_tokens(r, d_rows, d_gate)
        parts = jnp.sum(d_rows, axis=1, dtype=jnp.float32), d_gate[..., 0], d_weights
        return jax.tree.map(lambda total, new: total + new.astype(total.dtype), totals, parts)

    # Few rounds are summed, and a gradient of weights is as large as they are: it stays in their type.
    zeros = *(jnp.zeros(a.shape, jnp.float32) for a in (x, gates)), jax.tree.map(jnp.zeros_like, weights)
    dx, d_gates, d_weights = pairs.in_rounds(one_round, zeros)
    return dx.astype(x.dtype), None, d_gates.astype(gates.dtype), d_weights


move_tokens.defvjp(_move_tokens_fwd, _move_tokens_bwd)


class _Pairs:
    """The (token, expert) pairs of a device, sorted by expert, and how they travel."""

    def __init__(self, axes: Axes, experts: Array, gates: Array, local_experts: int):
        self.axes, self.experts, self.gates, self.local_experts = axes, experts, gates, local_experts
        self.n, self.k = experts.shape
        self.devices = lax.axis_size(axes.experts)
        most, mean = self.n * min(self.k, local_experts), -(-self.n * self.k // self.devices)
        self.capacity = min(most, max(8, int(SLACK * mean)))
        groups = group_by_expert(experts, self.devices * local_experts)
        self.order = groups.order
        self.sizes = jnp.sum(groups.counts.reshape(self.devices, local_experts), axis=1)  # pairs for each device
        self.starts = jnp.cumsum(self.sizes) - self.sizes
        self.device = experts // local_experts  # of each pair, [n k], and its place among those for that device
        self.place = groups.rank.reshape(self.n, self.k) - self.starts[self.device]
        self.rounds = -(-lax.pmax(jnp.max(self.sizes), axes.mesh) // self.capacity)

    def in_rounds(self, one_round: Callable[[Array, Any], Any], start: Any) -> Any:
        def turn(carry: Any) -> Any:
            return carry[0] + 1, one_round(*carry)

        with jax.named_scope("usually_once"):  # how many rounds a plan assumes
            start = jnp.zeros((), jnp.int32), start
            return lax.while_loop(lambda carry: carry[0] < self.rounds, turn, start)[1]

    def to_experts(self, r: Array, *of_tokens: Array) -> list[Array]:
        """What this device receives in round r, [devices x capacity, ...]: rows of these arrays, experts and gates. An
        empty row has an expert past the last and gate 0, and holds anything."""
        local = self.experts % self.local_experts
        place = r * self.capacity + jnp.arange(self.capacity)
        used = (place[None] < self.sizes[:, None]).ravel()
        pair = self.order[jnp.minimum(self.starts[:, None] + place[None], self.order.size - 1)].ravel()
        sent = [array[pair // self.k] for array in of_tokens]
        for array, empty in ((local, self.local_experts), (self.gates, 0)):
            sent.append(jnp.where(used, array.ravel()[pair], empty)[:, None])
        sizes = jnp.clip(self.sizes - r * self.capacity, 0, self.capacity)
        return [self._swap(a, sizes, back=False) for a in sent]

    def to_tokens(self, r: Array, *arrays: Array) -> list[Array]:
        """The way back: rows [devices x capacity, ...] to [n, k, ...], 0 for the pairs of other rounds."""
        sizes = jnp.clip(self.sizes - r * self.capacity, 0, self.capacity)
        row = self.device * self.capacity + self.place % self.capacity
        now = (self.place // self.capacity == r)[..., None]
        return [jnp.where(now, self._swap(a, sizes, back=True)[row], 0) for a in arrays]

    def _swap(self, rows: Array, sizes: Array, back: bool) -> Array:
        """Rows [devices x capacity, x]: block i goes to device i. sizes: of this device's pairs, there or back."""
        axis = self.axes.experts
        if not self.axes.ragged or rows.shape[1] == 1:
            return lax.all_to_all(rows, axis, 0, 0, tiled=True)
        theirs = lax.all_to_all(sizes, axis, 0, 0, tiled=True)
        send, receive = (theirs, sizes) if back else (sizes, theirs)
        starts = jnp.arange(self.devices, dtype=jnp.int32) * self.capacity
        mine = jnp.full(self.devices, lax.axis_index(axis) * self.capacity, jnp.int32)
        return lax.ragged_all_to_all(rows, jnp.zeros_like(rows), starts, send, mine, receive, axis_name=axis)
