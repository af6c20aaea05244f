"""The experts of a mixture: one function, three ways to run them on one device, and experts spread over devices.

dense    every expert for every token; the reference that the others must equal
grouped  pairs sorted by expert (`grouped_experts.py`), grouped matmuls: a kernel on TPU and GPU (`grouped_matmul.py`)
blocks   sorted blocks with a hand-written backward, for CPU (`expert_blocks.py`)

All are dropless: every (token, expert) pair is computed, whatever the load. On a mesh each device runs its own rows;
where the mesh spreads experts over devices, tokens move to them (`expert_parallel.py`).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float, Integer
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models.layers import OfLayer, whole

_KERNELS = ByName(
    {
        "Axes": "jaxrl_llm.models.experts.expert_parallel",
        "block_experts": "jaxrl_llm.models.experts.expert_blocks",
        "grouped_experts": "jaxrl_llm.models.experts.grouped_experts",
        "grouped_matmul": "jaxrl_llm.models.experts.grouped_matmul",
        "move_tokens": "jaxrl_llm.models.experts.expert_parallel",
    }
)

_TINY = 8e7  # FLOPs of the dense form up to which `auto` takes it on a CPU: under a millisecond, and quick to compile


def choose_implementation(implementation: str = "auto", mesh: Mesh | None = None) -> str:
    """The implementation that will run; `auto` goes by the platform of the mesh."""
    if implementation != "auto":
        return implementation
    return "blocks" if sharding.platform(mesh) == "cpu" else "grouped"


def apply_experts(
    x: Float[Array, "n d"],
    experts: Integer[Array, "n k"],
    gates: Float[Array, "n k"],
    w_gate: Float[Array, "e d f"] | OfLayer,
    w_up: Float[Array, "e d f"] | OfLayer,
    w_down: Float[Array, "e f d"] | OfLayer,
    *,
    implementation: str = "auto",
    mesh: Mesh | None = None,
) -> Float[Array, "n d"]:
    """y_n = sum_k gates_nk (silu(x_n W_gate[e]) * (x_n W_up[e])) W_down[e],  e = experts_nk.

    Sums are float32, the result has the dtype of x. A row that must not count has gates 0. On the mesh of the enclosing
    jit each device runs its own rows; its experts, or its part of their width, stay where they are.

    Source: Qwen3-MoE's sparse block (arXiv 2505.09388) with SwiGLU experts (arXiv 2002.05202, eq. 5).
    """
    form = choose_implementation(implementation, mesh)
    if implementation == "auto" and form == "blocks" and 6 * x.shape[0] * math.prod(w_gate.shape) <= _TINY:
        form = "dense"
    weights = w_gate, w_up, w_down
    if form != "grouped":
        weights = tuple(map(whole, weights))
    args = (x, experts, gates, weights)
    if form == "dense":
        return _dense(*args)
    if form == "grouped":
        matmul = functools.partial(_KERNELS["grouped_matmul"], platform=sharding.platform(mesh))
        local = functools.partial(_KERNELS["grouped_experts"], matmul)
    else:
        local = _KERNELS["block_experts"]
    return on_mesh(local, *args, mesh=mesh)


def on_mesh(local: Any, x: Array, experts: Array, gates: Array, weights: Any, mesh: Mesh | None) -> Array:
    """`local` on each device's rows; their number is padded to a multiple of the devices by rows of gate 0."""
    if mesh is None or mesh.size == 1:
        return local(x, experts, gates, weights)
    # XLA:GPU moves fewer bytes if its partitioner gathers the weights.
    on_tpu = sharding.platform(mesh) == "tpu"
    width = "embed" if on_tpu else None
    axes = (("expert", width, "mlp"), ("expert", width, "mlp"), ("expert", "mlp", width), *[("expert", "mlp")] * 2)
    specs: Any = tuple(sharding.spec(a, w.shape, mesh) for a, w in zip(axes, weights, strict=False))
    of_experts, of_width, of_hidden = specs[0]
    cuts = ((None, of_width), (None, of_width), (None, None, of_width), (), ())[: len(weights)]
    spread, summed = sharding.cutting(of_experts, mesh), sharding.cutting(of_hidden, mesh)
    rows = sharding.rows(mesh).spec
    layer = None
    if isinstance(weights[0], OfLayer):
        if sharding.cutting(of_width, mesh):  # what is gathered is a copy anyway
            weights = tuple(map(whole, weights))
        else:
            layer, weights = weights[0].layer, tuple(w.stack for w in weights)
            specs, cuts = tuple(PartitionSpec(None, *of) for of in specs), ((),) * len(specs)

    def run(x: Array, experts: Array, gates: Array, slices: Any, layer: Any) -> Array:
        weights = tuple(sharding.gathered(one, cut, mesh) for one, cut in zip(slices, cuts, strict=True))
        if layer is not None:
            weights = tuple(OfLayer(one, layer) for one in weights)
        if spread:
            places = _KERNELS["Axes"](spread[0], mesh.axis_names, ragged=on_tpu)
            y: Any = _KERNELS["move_tokens"](local, places, x, experts, gates, weights)
        else:
            y = local(x, experts, gates, weights)
        return lax.psum(y.astype(jnp.float32), summed).astype(x.dtype) if summed else y

    n, parts = x.shape[0], sharding.shards("rows", mesh)
    fill = ((0, -n % parts), (0, 0))
    x, experts, gates = (jnp.pad(a, fill) for a in (x, experts, gates))
    # check_vma=False: with it JAX 0.10 differentiates sort and switch on device-varying values wrongly.
    places = rows, rows, rows, specs, PartitionSpec()
    split = jax.shard_map(run, mesh=mesh, in_specs=places, out_specs=rows, check_vma=False)
    return split(x, experts, gates, weights, layer)[:n]


def _dense(x: Array, experts: Array, gates: Array, weights: Any) -> Array:
    w_gate, w_up, w_down = weights
    weight = jnp.einsum("nk,nke->ne", gates, jax.nn.one_hot(experts, w_gate.shape[0], dtype=gates.dtype))
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    hidden = jax.nn.silu(dot("nd,edf->nef", x, w_gate)) * dot("nd,edf->nef", x, w_up)
    return dot("nef,efd->nd", (hidden * weight[..., None]).astype(w_down.dtype), w_down).astype(x.dtype)
