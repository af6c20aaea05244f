"""SwiGLU experts on a CPU: blocks of rows of one expert, with a hand-written backward.

The (token, expert) pairs are sorted by expert. A loop over the experts slices each expert's weights once; an inner loop
of dynamic length walks that expert's rows in blocks of a fixed size. The last block of a group extends into the rows of
the next group, which overwrites them afterwards, so nothing is padded and only the tails of blocks are wasted work.
Everything besides the matmuls is a gather: dispatch reads x by the sorted order, combine reads the results by its
inverse, and the backward pass does the same the other way round.

The block size follows the mean load: a decode step uses blocks of 8 or 16 rows, and experts without a row are skipped.
One batched matmul over [expert, slot] decodes a tenth faster with even loads, and slower with real, skewed ones.
XLA:CPU's `ragged_dot` multiplies every row by every expert; experiments/performance/details.md has the figures.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.ground.array_typing import Array, Float, Integer

_BLOCK = 128  # rows; 128 and 256 are within noise of each other, 512 is slower (the operands leave the L2 cache)


class Groups(NamedTuple):
    """The (token, expert) pairs in expert order. order: pair n * k + slot of each sorted row; rank: its inverse."""

    order: Integer[Array, "p"]
    rank: Integer[Array, "p"]
    starts: Integer[Array, "e"]  # the first row of each expert, and how many it has
    counts: Integer[Array, "e"]


def group_by_expert(experts: Integer[Array, "n k"], num_experts: int) -> Groups:
    """Stable sort of the pairs by expert: expert and index in one word, which sorts three times faster than a pair.

    lax.sort, not argsort: the latter loses its axis inside shard_map.
    """
    flat = experts.reshape(-1).astype(jnp.uint32)
    index = jnp.arange(flat.size, dtype=jnp.int32)
    counts = jnp.sum(flat[:, None] == jnp.arange(num_experts, dtype=jnp.uint32)[None], axis=0, dtype=jnp.int32)
    bits = flat.size.bit_length()
    if bits + num_experts.bit_length() > 32:
        raise ValueError(
            f"{flat.size} (token, expert) pairs of {num_experts} experts at once; set updates.micro_batch_rows lower"
        )
    word = lax.sort((flat << bits) | index.astype(jnp.uint32), is_stable=False)
    order = (word & ((1 << bits) - 1)).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    return Groups(order, rank, jnp.cumsum(counts) - counts, counts)


def _block_size(pairs: int, num_experts: int) -> int:
    """A power of two near the mean load, at least 8; at most half of _BLOCK where tails would be many of the rows."""
    mean = max(1, pairs // num_experts)
    most = _BLOCK if mean >= 2 * _BLOCK else _BLOCK // 2
    return min(most, max(8, 1 << (mean - 1).bit_length()))


def _walk(groups: Groups, block: int, step, per_expert, carry):
    """carry = per_expert(e, carry, walk) for every expert that has rows; walk(weights, inner) goes over its blocks with
    inner = step(weights, first row, live rows, inner)."""
    empty = (groups.counts == 0).astype(jnp.int32)
    used_first = lax.sort((empty, jnp.arange(empty.size, dtype=jnp.int32)), num_keys=1, is_stable=True)[1]

    def expert(i, carry):
        e = used_first[i]
        start, count = groups.starts[e], groups.counts[e]

        def walk(weights, inner):
            def body(i, inner):
                return step(weights, start + i * block, count - i * block, inner)

            return lax.fori_loop(0, (count + block - 1) // block, body, inner)

        return per_expert(e, carry, walk)

    return lax.fori_loop(0, empty.size - jnp.sum(empty), expert, carry)


@jax.custom_vjp
def block_experts(
    x: Float[Array, "n d"],
    experts: Integer[Array, "n k"],
    gates: Float[Array, "n k"],
    weights: tuple[Float[Array, "e d f"], Float[Array, "e d f"], Float[Array, "e f d"]],
) -> Float[Array, "n d"]:
    """y_n = sum_k gates_nk (silu(x_n W_gate[e]) * (x_n W_up[e])) W_down[e], e = experts_nk; sums in float32."""
    return _forward(x, experts, gates, weights, keep=False)[0]


def of_slots(
    x: Float[Array, "n d"], experts: Integer[Array, "n k"], weights: tuple[Array, ...], block: int
) -> Float[Array, "n k d"]:
    """The output of each expert of a token, in blocks of so many rows; sums in float32."""
    groups = group_by_expert(experts, len(weights[0]))
    return _outputs(x, experts, weights, groups, block, keep=False)[0][groups.rank].reshape(*experts.shape, -1)


def _forward(x, experts, gates, weights, keep=True):
    num_experts = len(weights[0])
    groups, block = group_by_expert(experts, num_experts), _block_size(experts.size, num_experts)
    rows, *kept = _outputs(x, experts, weights, groups, block, keep)
    y = jnp.einsum("nkd,nk->nd", rows[groups.rank].reshape(*gates.shape, -1), gates)
    return y.astype(x.dtype), (x, gates, weights, groups, kept)


def _outputs(x, experts, weights, groups, block, keep):
    """The rows in expert order; keeps a = x W_gate and b = x W_up for a backward. The last `block` rows are scratch."""
    _, d, f = weights[0].shape
    token = jnp.pad(groups.order, (0, block)) // experts.shape[1]

    def step(w, row, _, carry):  # rows past the group's end are overwritten by the next group
        gate, up, down = w
        rows = x[lax.dynamic_slice(token, (row,), (block,))].astype(jnp.float32)
        a, b = rows @ gate, rows @ up
        new = ((jax.nn.silu(a) * b) @ down, a, b)
        return [lax.dynamic_update_slice(old, v, (row, 0)) for old, v in zip(carry, new, strict=False)]

    def per_expert(e, carry, walk):
        return walk([w[e].astype(jnp.float32) for w in weights], carry)

    start = [jnp.zeros((experts.size + block, n), jnp.float32) for n in ((d, f, f) if keep else (d,))]
    return _walk(groups, block, step, per_expert, start)


def _backward(residuals, dy):
    """With a = x W_gate, b = x W_up, h = silu(a) b, y = g h W_down and dy the cotangent of y,

    dg = <dy W_down^T, h>    dh = g dy W_down^T    db = dh silu(a)    da = dh b silu'(a)
    dW_down = (g h)^T dy     dW_gate = x^T da      dW_up = x^T db     dx = da W_gate^T + db W_up^T
    with silu(a) = a s, silu'(a) = s + silu(a) (1 - s), s = sigmoid(a).

    a and b are kept from the forward, 2 f floats a pair, which saves two of eleven matmuls. Rematerialisation drops
    them.
    """
    x, gates, weights, groups, kept = residuals
    k, (num_experts, d, _) = gates.shape[1], weights[0].shape
    pairs = groups.order.size
    block = _block_size(pairs, num_experts)
    order = jnp.pad(groups.order, (0, block))
    flat_gates = gates.reshape(-1).astype(jnp.float32)

    def step(w, row, live, carry):
        dx, dg, d_gate, d_up, d_down = carry
        gate, up, down = w
        pair = lax.dynamic_slice(order, (row,), (block,))
        token, valid = pair // k, jnp.arange(block) < live
        rows = x[token].astype(jnp.float32)
        cotangent = jnp.where(valid[:, None], dy[token].astype(jnp.float32), 0.0)
        g = flat_gates[pair][:, None]
        a, b = (lax.dynamic_slice(z, (row, 0), (block, z.shape[1])) for z in kept)
        s = jax.nn.sigmoid(a)
        act = a * s
        h = act * b
        dh = cotangent @ down.T
        new_dg = jnp.sum(dh * h, axis=-1)
        dh = dh * g
        da, db = dh * b * (s + act * (1.0 - s)), dh * act
        return (
            lax.dynamic_update_slice(dx, da @ gate.T + db @ up.T, (row, 0)),
            lax.dynamic_update_slice(dg, new_dg, (row,)),
            d_gate + rows.T @ da,
            d_up + rows.T @ db,
            d_down + (g * h).T @ cotangent,
        )

    def per_expert(e, carry, walk):
        dx, dg, *totals = carry
        zeros = [jnp.zeros(w.shape[1:], jnp.float32) for w in weights]
        dx, dg, *new = walk([w[e].astype(jnp.float32) for w in weights], (dx, dg, *zeros))
        return dx, dg, *(t.at[e].set(n.astype(t.dtype)) for t, n in zip(totals, new, strict=True))

    start = (jnp.zeros((pairs + block, d), jnp.float32), jnp.zeros(pairs + block, jnp.float32))
    dx, dg, *dw = _walk(groups, block, step, per_expert, (*start, *(jnp.zeros_like(w) for w in weights)))
    dx = jnp.sum(dx[groups.rank].reshape(*gates.shape, d), axis=1).astype(x.dtype)
    dg = dg[groups.rank].reshape(gates.shape).astype(gates.dtype)
    return dx, None, dg, tuple(dw)


block_experts.defvjp(_forward, _backward)
