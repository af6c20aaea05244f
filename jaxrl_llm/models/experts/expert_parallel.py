"""Expert parallelism: tokens are sent to the devices that hold their experts, and the results are sent back.

Inside shard_map over the mesh axis of the experts every device holds its own tokens and E / p of the E experts (p
devices). In a round every device sends at most so many (token, expert) pairs to every other, computes what it received
and sends the results back, until all pairs are done: no token is dropped whatever the load. Where empty rows are not
sent, a round has room to spare and is usually the only one. Elsewhere the first takes what an even or random load needs
and each further one a quarter of an even load, so that what is sent stays near the load of the fullest.

The backward is written by hand: it goes through the same rounds, sends states and cotangents together and recomputes
the experts' inner activations, so that a layer keeps nothing but its arguments.

Source: GShard, arXiv 2006.16668, section 3.2, with rounds instead of dropped tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.ground.array_typing import Array, Float, Integer
from jaxrl_llm.models.experts.expert_blocks import group_by_expert

# Rows of a round's buffers relative to an even load: of any where empty ones are not sent, elsewhere of a further one.
_SPARE, _FURTHER = 1.5, 1 / 4

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


def filled(ragged: bool) -> float:
    """The share of the buffers' rows that an even load fills, in the rounds that a plan assumes; of many tokens."""
    return 1 / (_SPARE if ragged else 1 + _FURTHER)


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

    def one_round(places: Array, y: Array) -> Array:
        rows, expert, gate = pairs.to_experts(places, x)
        (z,) = pairs.to_tokens(places, local(rows, expert, gate, weights))
        return y + jnp.sum(z, axis=1, dtype=jnp.float32)

    return pairs.in_rounds(one_round, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype)


def _move_tokens_fwd(local: Local, axes: Axes, *args: Any) -> tuple[Array, Any]:
    return move_tokens(local, axes, *args), args


def _move_tokens_bwd(local: Local, axes: Axes, residuals: Any, dy: Array) -> tuple[Any, ...]:
    x, experts, gates, weights = residuals
    pairs = _Pairs(axes, experts, gates, weights[0].shape[0])

    def one_round(places: Array, totals: Any) -> Any:
        rows, cotangents, expert, gate = pairs.to_experts(places, x, dy)
        _, pull = jax.vjp(lambda rows, gate, weights: local(rows, expert, gate, weights), rows, gate, weights)
        d_rows, d_gate, d_weights = pull(cotangents)
        d_rows, d_gate = pairs.to_tokens(places, d_rows, d_gate)
        parts = jnp.sum(d_rows, axis=1, dtype=jnp.float32), d_gate[..., 0], d_weights
        return jax.tree.map(lambda total, new: total + new.astype(total.dtype), totals, parts)

    # Usually one or two rounds are summed, and a gradient of weights is as large as they are: it stays in their type.
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
        groups = group_by_expert(experts, self.devices * local_experts)
        self.order = groups.order
        self.sizes = jnp.sum(groups.counts.reshape(self.devices, local_experts), axis=1)  # pairs for each device
        self.starts = jnp.cumsum(self.sizes) - self.sizes
        self.device = experts // local_experts  # of each pair, [n k], and its place among those for that device
        self.place = groups.rank.reshape(self.n, self.k) - self.starts[self.device]
        self.fullest = lax.pmax(jnp.max(self.sizes), axes.mesh)
        self.most, even = self.n * min(self.k, local_experts), self.n * self.k / self.devices
        likely = even + 3 * math.sqrt(even)  # three standard deviations of a random load above
        self.first = 0 if axes.ragged else min(self.most, math.ceil(likely))
        self.further = min(self.most, math.ceil(max(likely, _SPARE * even) if axes.ragged else _FURTHER * even))

    def in_rounds(self, one_round: Callable[[Array, Any], Any], start: Any) -> Any:
        """Rounds over the places that pairs have among those for one device; each gets its places, in order."""
        totals = one_round(jnp.arange(self.first), start) if self.first else start
        if self.first == self.most:
            return totals

        def turn(carry: Any) -> Any:
            done, totals = carry
            return done + self.further, one_round(done + jnp.arange(self.further), totals)

        with jax.named_scope("usually_once"):  # what a plan assumes
            return lax.while_loop(lambda carry: carry[0] < self.fullest, turn, (jnp.int32(self.first), totals))[1]

    def to_experts(self, places: Array, *of_tokens: Array) -> list[Array]:
        """Rows that this device receives in a round, [devices x places, ...]: of these arrays, experts and gates. An
        empty row has an expert past the last and gate 0, and holds anything."""
        local = self.experts % self.local_experts
        used = (places[None] < self.sizes[:, None]).ravel()
        pair = self.order[jnp.minimum(self.starts[:, None] + places[None], self.order.size - 1)].ravel()
        sent = [array[pair // self.k] for array in of_tokens]
        for array, empty in ((local, self.local_experts), (self.gates, 0)):
            sent.append(jnp.where(used, array.ravel()[pair], empty)[:, None])
        return [self._swap(a, places, back=False) for a in sent]

    def to_tokens(self, places: Array, *arrays: Array) -> list[Array]:
        """The way back: rows [devices x places, ...] to [n, k, ...], 0 for the pairs of other rounds."""
        place = self.place - places[0]
        now = ((place >= 0) & (place < places.size))[..., None]
        row = self.device * places.size + jnp.clip(place, 0, places.size - 1)
        return [jnp.where(now, self._swap(a, places, back=True)[row], 0) for a in arrays]

    def _swap(self, rows: Array, places: Array, back: bool) -> Array:
        """Rows [devices x places, x]: block i goes to device i. On the way back they are of pairs that came from it."""
        axis, capacity = self.axes.experts, places.size
        if not self.axes.ragged or rows.shape[1] == 1:
            return lax.all_to_all(rows, axis, 0, 0, tiled=True)
        mine = jnp.clip(self.sizes - places[0], 0, capacity)
        theirs = lax.all_to_all(mine, axis, 0, 0, tiled=True)
        send, receive = (theirs, mine) if back else (mine, theirs)
        starts = jnp.arange(self.devices, dtype=jnp.int32) * capacity
        there = jnp.full(self.devices, lax.axis_index(axis) * capacity, jnp.int32)
        return lax.ragged_all_to_all(rows, jnp.zeros_like(rows), starts, send, there, receive, axis_name=axis)
