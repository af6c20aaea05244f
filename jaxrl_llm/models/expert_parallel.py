"""Experts that stay where they are: tokens move to the devices of their experts, and their results back.

Both functions run inside shard_map over the mesh axis of the experts, where every device holds its own tokens and E / p
of the E experts (p devices). They drop no token whatever the load: each buffer holds the worst case.

exchange  a ragged all-to-all sends every (token, expert) pair to its expert's device and brings the result back; a few
          turns over slices of the tokens keep the buffer near the number of a device's own pairs
ring      tokens and their growing results travel round the ring of devices, each adding what its experts give; for
          platforms without a sound ragged all-to-all: XLA:CPU lacks one, and on GPU the one-shot lowering corrupts
          gradients and fails above 32 ranks

Source: GShard, arXiv 2006.16668, section 3.2, without its capacity.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxrl_llm.array_typing import Array, Float, Integer
from jaxrl_llm.models.expert_blocks import group_by_expert

__all__ = ["Local", "exchange", "ring"]

Local = Callable[
    [Array, Array, Array, Any], Array
]  # (x, experts, gates, weights) -> y; expert E / p and up is nobody's
_ROOM = 2  # buffers, in pairs of a device's own tokens


def ring(
    local: Local,
    x: Float[Array, "n d"],
    experts: Integer[Array, "n k"],
    gates: Float[Array, "n k"],
    weights: Any,
    axis: str,
) -> Float[Array, "n d"]:
    """Every device's tokens visit every device once: p turns, each sends [n, 2 d] on."""
    devices, held = lax.axis_size(axis), weights[0].shape[0]
    first = lax.axis_index(axis) * held
    onward = [(i, (i + 1) % devices) for i in range(devices)]

    def turn(carry: Any, _: None) -> tuple[Any, None]:
        x, experts, gates, y = carry
        mine = (experts >= first) & (experts < first + held)
        here = jnp.where(mine, experts - first, held)
        y = y + local(x, here, jnp.where(mine, gates, 0), weights).astype(jnp.float32)
        return lax.ppermute((x, experts, gates, y), axis, onward), None

    start = (x, experts, gates, jnp.zeros(x.shape, jnp.float32))
    return lax.scan(turn, start, None, length=devices)[0][-1].astype(x.dtype)


def exchange(
    local: Local,
    x: Float[Array, "n d"],
    experts: Integer[Array, "n k"],
    gates: Float[Array, "n k"],
    weights: Any,
    axis: str,
) -> Float[Array, "n d"]:
    """Each (token, expert) pair goes to its expert's device and back: about 2 k n d numbers sent, whatever p is."""
    n, k = experts.shape
    devices, held = lax.axis_size(axis), weights[0].shape[0]
    turns = min(n, -(-devices * min(k, held) // (_ROOM * k)))
    pad = -n % turns

    def turn(_: None, slice: Any) -> tuple[None, Array]:
        return None, _exchange_once(local, *slice, weights, axis)

    slices = [
        jnp.pad(a, ((0, pad), (0, 0))).reshape(turns, -1, a.shape[1])
        for a in (x, experts, gates)  # padding goes to expert 0 with gate 0
    ]
    if turns == 1:
        return _exchange_once(local, *(s[0] for s in slices), weights, axis)[:n]
    return lax.scan(turn, None, tuple(slices))[1].reshape(n + pad, -1)[:n]


def _exchange_once(local: Local, x: Array, experts: Array, gates: Array, weights: Any, axis: str) -> Array:
    (n, k), d = experts.shape, x.shape[1]
    devices, held = lax.axis_size(axis), weights[0].shape[0]
    groups = group_by_expert(experts, devices * held)
    counts = lax.all_gather(groups.counts, axis).reshape(devices, devices, held)  # [from, to, expert of its]
    sizes = jnp.sum(counts, axis=2)
    me = lax.axis_index(axis)
    sent, received = sizes[me], sizes[:, me]
    sent_from, written_to = jnp.cumsum(sent) - sent, (jnp.cumsum(sizes, axis=0) - sizes)[me]
    back_from, back_to = jnp.cumsum(received) - received, (jnp.cumsum(sizes, axis=1) - sizes)[:, me]

    room = jnp.zeros((devices * n * min(k, held), d), x.dtype)
    rows = x[groups.order // k]
    got = lax.ragged_all_to_all(rows, room, sent_from, sent, written_to, received, axis_name=axis)
    # Each device's rows come sorted by expert: the ends of these stretches say what a row is for.
    ends = jnp.cumsum(counts[:, me].ravel())
    stretch = jnp.sum(jnp.arange(len(room))[:, None] >= ends[None], axis=1)
    used = stretch < devices * held
    here = jnp.where(used, stretch % held, held)[:, None]
    y = local(jnp.where(used[:, None], got, 0), here, used[:, None].astype(gates.dtype), weights)
    back = lax.ragged_all_to_all(y, jnp.zeros((n * k, d), x.dtype), back_from, received, back_to, sent, axis_name=axis)
    return jnp.einsum("nkd,nk->nd", back[groups.rank].reshape(n, k, d), gates).astype(x.dtype)
