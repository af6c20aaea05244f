"""SwiGLU experts by grouped matmuls, with a backward that moves few bytes: on an accelerator a layer takes as long as
reading and writing between its products does, not the products.

The (token, expert) pairs are sorted by expert and stay in the compute type between products; what follows a product is
computed in float32 and fused into one pass. Rows of no expert hold anything until a result leaves the sorted order, and
are left out there, once. In both directions rows are gathered, never scattered. W_gate and W_up are the halves of one
product, which reads its rows once; a decode step, whose time is that of reading the matrices, does not copy them first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float, Integer
from jaxrl_llm.models.experts.expert_blocks import Groups, group_by_expert
from jaxrl_llm.models.layers import OfLayer, whole

_TILE = 128  # rows of an expert from which the products and not the matrices take the time

# (rows, weights, counts=) -> rows_i @ weights_e, undefined past the last group: `grouped_matmul` of a platform
Dot = Callable[..., Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_experts(
    dot: Dot,
    x: Float[Array, "n d"],
    experts: Integer[Array, "n k"],
    gates: Float[Array, "n k"],
    weights: Sequence[Array | OfLayer],
) -> Float[Array, "n d"]:
    """y_n = sum_k gates_nk (silu(x_n W_gate[e]) * (x_n W_up[e])) W_down[e], e = experts_nk; products sum in float32.

    A pair whose expert is not among the weights gives 0, and no token has more pairs than there are experts here.
    """
    return _forward(dot, x, experts, gates, weights)[0]


def _forward(dot: Dot, x: Array, experts: Array, gates: Array, weights: Sequence[Any]) -> tuple[Array, Any]:
    w_gate, w_up, w_down = weights
    groups = group_by_expert(experts, len(w_gate))
    dot = functools.partial(dot, counts=groups.counts)
    rows = x[tokens_of(groups, experts, len(w_gate))]
    if len(rows) < _TILE * len(w_gate):
        a, b = dot(rows, w_gate), dot(rows, w_up)
    else:
        a, b = jnp.split(dot(rows, jnp.concatenate([whole(w_gate), whole(w_up)], axis=2)), 2, axis=1)
    hidden = jax.nn.silu(a.astype(jnp.float32)) * b.astype(jnp.float32)
    out = of_pairs(dot(hidden.astype(x.dtype), w_down), groups, gates.shape)
    y = jnp.einsum("nkd,nk->nd", out, gates, preferred_element_type=jnp.float32)
    return y.astype(x.dtype), (x, experts, gates, weights, groups, a, b)


def _backward(dot: Dot, residuals: Any, dy: Array) -> tuple[Array, None, Array, tuple[Array, ...]]:
    """Backward as in `block_experts`: h = silu(a) b, v = dy W_down^T, dg = <v, h>, dh = g v, dW_down = (g h)^T dy. What
    the last product gives is not needed, so it is not computed again."""
    x, experts, gates, (w_gate, w_up, w_down), groups, a, b = residuals
    dot = functools.partial(dot, counts=groups.counts)
    token = tokens_of(groups, experts, len(w_gate))
    rows, dtype = x[token], x.dtype
    g = gates.reshape(-1)[groups.order[: len(token)]].astype(jnp.float32)[:, None]
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    s = jax.nn.sigmoid(a)
    act = a * s
    h = act * b
    v, d_down = jax.vjp(dot, (g * h).astype(dtype), w_down)[1](dy[token].astype(dtype))
    v = v.astype(jnp.float32)
    dg = jnp.sum(v * h, axis=-1, keepdims=True)
    da, db = (g * v * b * (s + act * (1.0 - s))).astype(dtype), (g * v * act).astype(dtype)
    d_rows, d_both = jax.vjp(dot, rows, jnp.concatenate([w_gate, w_up], axis=2))[1](jnp.concatenate([da, db], axis=1))
    d_gate, d_up = jnp.split(d_both, 2, axis=2)
    dx = of_pairs(d_rows, groups, gates.shape)
    dg = of_pairs(dg, groups, gates.shape)[..., 0]
    return jnp.sum(dx, axis=1, dtype=jnp.float32).astype(dtype), None, dg.astype(gates.dtype), (d_gate, d_up, d_down)


grouped_experts.defvjp(_forward, _backward)


def tokens_of(groups: Groups, experts: Array, num_experts: int) -> Array:
    """Return the token of each sorted row that can hold a pair of an expert here."""
    n, k = experts.shape
    return groups.order[: n * min(k, num_experts)] // k


def of_pairs(rows: Array, groups: Groups, shape: tuple[int, ...]) -> Array:
    """Sorted rows as [n k x], 0 where a pair has no expert here."""
    here = (groups.rank < jnp.sum(groups.counts))[:, None]
    return jnp.where(here, rows[jnp.minimum(groups.rank, len(rows) - 1)], 0).reshape(*shape, -1)
