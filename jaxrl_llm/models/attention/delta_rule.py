"""The gated delta rule (Yang et al., arXiv 2412.06464) in chunks, and the short causal convolution before it, for rows
of several segments. Loaded where a config has layers of it."""

import functools

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, SegmentIds


def order_of(segment_ids: SegmentIds) -> Integer[Array, "b t"]:
    """Number the segments of each row from 0, which a state that comes before the row belongs to. Padding (id 0) counts
    as part of what is before it."""
    starts = (segment_ids[:, 1:] != segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    return jnp.pad(jnp.cumsum(starts, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def delta_rule(
    queries: Float[Array, "b t h k"],
    keys: Float[Array, "b t h k"],
    values: Float[Array, "b t h v"],
    log_decay: Float[Array, "b t h"],
    beta: Float[Array, "b t h"],
    order: Integer[Array, "b t"],
    state: Float[Array, "b h k v"],
    chunk: int = 64,
) -> tuple[Float[Array, "b t h v"], Float[Array, "b h k v"]]:
    """Return o_t = S_t^T q_t of every token and the last state, in float32, where in a segment

        S_t = e^(g_t) S_(t-1) + k_t u_t^T,   u_t = beta_t (v_t - e^(g_t) S_(t-1)^T k_t)

    and a later segment of a row starts from S = 0. A token with g = beta = 0 leaves the state as it is.

    In a chunk, with c the running sum of g and D_ij = e^(c_i - c_j) for j <= i of one segment, the u solve a triangular
    system (section 3.3 of the source): (I + tril(beta K K^T * D, -1)) U = beta (V - e^c K S), o = e^c Q S +
    (Q K^T * D) U. What S is multiplied by is 0 for tokens of a segment that began after it.

    Args:
      queries, keys: scaled and normalised.
      log_decay: g, at most 0.
      order: of each token's segment, as `order_of` numbers them; `state` belongs to 0.
      chunk: tokens between which the backward keeps a state.
    """
    size = min(chunk, order.shape[1])
    padded = -order.shape[1] % size

    def chunks(x: Array) -> Float[Array, "n b h c ..."]:
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, padded), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), (1, 3), (0, 2))

    numbers = jnp.pad(order, ((0, 0), (0, padded)), mode="edge").reshape(len(order), -1, size).swapaxes(0, 1)
    before = jnp.pad(numbers[:-1, :, -1], ((1, 0), (0, 0)))
    inputs = (*map(chunks, (queries, keys, values, log_decay, beta)), numbers, before)
    state, out = jax.lax.scan(jax.checkpoint(_chunk, prevent_cse=False), state.astype(jnp.float32), inputs)
    out = jnp.moveaxis(out, (0, 2), (1, 3))
    return out.reshape(len(order), -1, *out.shape[3:])[:, : order.shape[1]], state


def _chunk(state: Float[Array, "b h k v"], inputs: tuple[Array, ...]) -> tuple[Array, Float[Array, "b h c v"]]:
    q, k, v, log_decay, beta, order, before = inputs
    size, total = order.shape[1], jnp.cumsum(log_decay, axis=-1)
    causal = jnp.tril(jnp.ones((1, 1, size, size), bool)) & (order[:, None, :, None] == order[:, None, None, :])
    # The difference is masked before exp, whose gradient would be NaN where it overflows.
    decay = jnp.where(causal, jnp.exp(jnp.where(causal, total[..., :, None] - total[..., None, :], 0)), 0)
    carried = jnp.where((order == before[:, None])[:, None], jnp.exp(total), 0)[..., None]
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    updates = beta[..., None] * (v - carried * dot("bhck,bhkv->bhcv", k, state))
    if size > 1:
        system = beta[..., None] * dot("bhck,bhdk->bhcd", k, k) * decay
        updates = jax.lax.linalg.triangular_solve(system, updates, left_side=True, lower=True, unit_diagonal=True)
    out = carried * dot("bhck,bhkv->bhcv", q, state) + dot("bhck,bhdk->bhcd", q, k) * decay @ updates
    state = carried[..., -1:, :] * state + dot("bhck,bhcv->bhkv", k * decay[..., -1, :, None], updates)
    return state, out


def causal_convolution(
    x: Float[Array, "b t c"],
    weight: Float[Array, "c n"],
    before: Float[Array, "b m c"],
    order: Integer[Array, "b t"],
    real: Bool[Array, "b t"],
) -> tuple[Float[Array, "b t c"], Float[Array, "b m c"]]:
    """Convolve each channel with n weights, the last of which is of the token itself.

    Args:
      before: the m = n - 1 inputs before the row, of segment 0 of `order`; inputs of other segments count as 0.
      real: tokens that are no padding, which is behind them.

    Returns:
      The sums in float32, and the last m inputs of the last segment.
    """
    (_, time, _), last = x.shape, weight.shape[1] - 1
    inputs = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    numbers = jnp.pad(order, ((0, 0), (last, 0)))
    out = jnp.zeros(x.shape, jnp.float32)
    for at in range(last + 1):
        own = (numbers[:, at : at + time] == order)[..., None]
        out += jnp.where(own, inputs[:, at : at + time], 0) * weight[None, None, :, at].astype(jnp.float32)
    held = jnp.where((numbers == order[:, -1:])[..., None], inputs, 0)
    places = jnp.sum(real, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(last)[None]
    return out, jnp.take_along_axis(held, places[..., None], axis=1)
