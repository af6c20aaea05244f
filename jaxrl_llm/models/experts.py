"""The experts of a mixture: one function, three ways to run it.

dense    every expert for every token; the reference that the others must equal, and the form that the partitioner
         splits over a sharded expert or tensor axis
grouped  `jax.lax.ragged_dot`, the grouped matmul that XLA hands to a kernel on GPU and TPU
blocks   sorted blocks with a hand-written backward, for CPU (`expert_blocks.py`)

All are dropless: every (token, expert) pair is computed, whatever the load.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.array_typing import Array, Float, Integer
from jaxrl_llm.models.expert_blocks import block_experts, group_by_expert

__all__ = ["IMPLEMENTATIONS", "apply_experts", "choose_implementation"]

_TINY = 8e7  # FLOPs of the dense form up to which `auto` takes it on a CPU: under a millisecond, and quick to compile

IMPLEMENTATIONS = ("auto", "dense", "grouped", "blocks")


def choose_implementation(implementation: str = "auto", mesh: Mesh | None = None) -> str:
    """The implementation that will run: by platform for `auto`; blocks become dense where experts or width are sharded.

    Raises:
      ValueError: unknown name.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is not one of {IMPLEMENTATIONS}; set model.experts_implementation"
        )
    if implementation == "auto":
        implementation = "blocks" if sharding.platform(mesh) == "cpu" else "grouped"
    if implementation == "blocks" and mesh is not None and sharding.row_shards(mesh) != mesh.size:
        return "dense"
    return implementation


def apply_experts(
    x: Float[Array, "n d"],
    experts: Integer[Array, "n k"],
    gates: Float[Array, "n k"],
    w_gate: Float[Array, "e d f"],
    w_up: Float[Array, "e d f"],
    w_down: Float[Array, "e f d"],
    *,
    implementation: str = "auto",
    mesh: Mesh | None = None,
) -> Float[Array, "n d"]:
    """y_n = sum_k gates_nk (silu(x_n W_gate[e]) * (x_n W_up[e])) W_down[e],  e = experts_nk.

    Args:
      x: token states; the result has this dtype, sums are float32.
      experts: valid expert indices; a row that must not count carries gates 0.
      gates: float32 weights of the k experts of each token.
      w_gate, w_up, w_down: SwiGLU weights of all experts.
      implementation: auto, dense, grouped or blocks.
      mesh: the mesh of the enclosing jit, if any. Where only rows are sharded each device runs its own rows against the
        gathered weights; otherwise the partitioner splits the chosen form.

    Raises:
      ValueError: unknown implementation.

    Source: Qwen3-MoE's sparse block (arXiv 2505.09388) with SwiGLU experts (arXiv 2002.05202, eq. 5).
    """
    chosen = choose_implementation(implementation, mesh)
    if implementation == "auto" and chosen == "blocks" and 6 * x.shape[0] * w_gate.size <= _TINY:
        chosen = "dense"
    args = (x, experts, gates, w_gate, w_up, w_down)
    if chosen == "dense":
        return _dense(*args)
    run = block_experts if chosen == "blocks" else _grouped
    if mesh is None or mesh.size == 1:
        return run(*args)
    if sharding.row_shards(mesh) == mesh.size and x.shape[0] % mesh.size == 0:
        rows, whole = sharding.rows(mesh).spec, PartitionSpec()
        # check_vma=False: with it JAX 0.10 differentiates sort and switch on device-varying values wrongly.
        split = jax.shard_map(run, mesh=mesh, in_specs=(rows,) * 3 + (whole,) * 3, out_specs=rows, check_vma=False)
        return split(*args)
    return _dense(*args) if chosen == "blocks" else run(*args)


def _dense(x, experts, gates, w_gate, w_up, w_down):
    weight = jnp.einsum("nk,nke->ne", gates, jax.nn.one_hot(experts, w_gate.shape[0], dtype=gates.dtype))
    dot = lambda spec, a, b: jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)  # noqa: E731
    hidden = jax.nn.silu(dot("nd,edf->nef", x, w_gate)) * dot("nd,edf->nef", x, w_up)
    return dot("nef,efd->nd", (hidden * weight[..., None]).astype(w_down.dtype), w_down).astype(x.dtype)


def _grouped(x, experts, gates, w_gate, w_up, w_down):
    groups = group_by_expert(experts, w_gate.shape[0])
    rows = x[groups.order // experts.shape[1]]
    dot = lambda a, b: jax.lax.ragged_dot(a, b, groups.counts, preferred_element_type=jnp.float32)  # noqa: E731
    hidden = jax.nn.silu(dot(rows, w_gate)) * dot(rows, w_up)
    out = dot(hidden.astype(w_down.dtype), w_down)[groups.rank].reshape(*gates.shape, -1)
    return jnp.einsum("nkd,nk->nd", out, gates).astype(x.dtype)
