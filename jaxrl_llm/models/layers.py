"""Parts of all layers: a norm, a weight, and a weight with a low-rank change beside it."""

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float, Integer, Tokens
from jaxrl_llm.models.architecture import ModelConfig


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, or * (1 + scale), in float32 (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, config: ModelConfig, eps: float | None = None):
        start = jnp.zeros if config.norm_offset else jnp.ones
        self.scale = nnx.Param(start(size, config.param_dtype), logical=("norm",))
        self.eps, self.offset = config.rms_norm_eps if eps is None else eps, config.norm_offset

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        scale = self.scale[...]
        return normalise(x, 1 + scale.astype(jnp.float32) if self.offset else scale, self.eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def normalise(x: Array, scale: Array, eps: float) -> Array:
    """`RMSNorm` as a function."""
    return _normalise_fwd(x, scale, eps)[0]


def _normalise_fwd(x: Array, scale: Array, eps: float) -> tuple[Array, Any]:
    y = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * inverse * _on_last_axis(scale, x.ndim)).astype(x.dtype), (x, inverse, scale)


def _normalise_bwd(eps: float, residuals: Any, cotangent: Array) -> tuple[Array, Array]:
    """With y = x / rms and g = scale dy: dx = (g - y mean(g y)) / rms, dscale = sum dy y. Written by hand, because the
    one that autodiff derives reads and writes the states about twice as often."""
    x, inverse, scale = residuals
    y, dy = x.astype(jnp.float32) * inverse, cotangent.astype(jnp.float32)
    g = dy * _on_last_axis(scale, x.ndim)
    dx = inverse * (g - y * jnp.mean(g * y, axis=-1, keepdims=True))
    return dx.astype(x.dtype), jnp.sum(dy * y, axis=tuple(range(x.ndim - 1))).astype(scale.dtype)


normalise.defvjp(_normalise_fwd, _normalise_bwd)


def _on_last_axis(scale: Array, ndim: int) -> Array:
    return scale.astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))


def scaled(x: Float[Array, "*any"], factor: float) -> Float[Array, "*any"]:
    """x * factor; by 1, x itself, so that the program of a model without the factor is the same."""
    return x if factor == 1 else x * factor


def matrix(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], config: ModelConfig) -> nnx.Param:
    """A weight with standard deviation 1/sqrt(fan_in) and its logical axes."""
    values = jax.random.normal(rngs.params(), shape, jnp.float32) * shape[-2] ** -0.5
    return nnx.Param(values.astype(config.param_dtype), logical=axes)


class LowRank(flax.struct.PyTreeNode):
    """weight [*lead m n], a [*lead m r], b [*lead r n]; the scale is part of a. Indexes and casts as a weight does."""

    weight: Float[Array, "*lead m n"]
    a: Float[Array, "*lead m r"]
    b: Float[Array, "*lead r n"]

    def __getitem__(self, index: Any) -> "LowRank":
        return jax.tree.map(lambda x: x[index], self)

    def astype(self, dtype: Any) -> "LowRank":
        return jax.tree.map(lambda x: x.astype(dtype), self)


FEW_ROWS = 64  # up to which XLA:CPU multiplies W^T faster than W; for more the two are alike


class Transposed(flax.struct.PyTreeNode):
    """A weight [m n] kept as W^T: XLA:CPU multiplies 8 to 32 rows by it in 0.55 to 0.7 of the time that W takes.

    Without it a rollout of 8 answers of SmolLM2-135M at 128 + 96 tokens takes 1.11 times the CPU time (1.08 to 1.17 in
    six pairs), and one of the tiny workload S as long as with it (1.00, 0.92 to 1.03).
    """

    value: Float[Array, "n m"]

    def __getitem__(self, index: Any) -> "Transposed":
        return Transposed(self.value[index])

    def astype(self, dtype: Any) -> "Transposed":
        return Transposed(self.value.astype(dtype))


class OfLayer(flax.struct.PyTreeNode):
    """One layer of a stack, taken out only where it is read: a slice that a loop over layers hands to a condition or to
    a kernel is a copy. Indexes and casts as a weight does."""

    stack: Float[Array, "*stack"]  # [layers, *shape]
    layer: Integer[Array, ""]

    @property
    def value(self) -> Float[Array, "*shape"]:
        return lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self if index is Ellipsis else self.value[index]

    def astype(self, dtype: Any) -> "OfLayer":
        return OfLayer(self.stack.astype(dtype), self.layer)


def project(x: Float[Array, "*batch m"], weight: Any, dtype: Any = None) -> Float[Array, "*batch n"]:
    """x W, or x W + (x A) B: where W is frozen its gradient, a third of a step's FLOPs, is never computed. dtype: of
    sums and result; default: that of x."""
    weight = weight.astype(x.dtype)
    if isinstance(weight, LowRank):
        return x @ weight.weight + (x @ weight.a) @ weight.b
    if not isinstance(weight, Transposed):
        return _product(x, weight) if dtype is None else jnp.matmul(x, weight, preferred_element_type=dtype)
    y = lax.dot_general(weight.value, x, (((1,), (x.ndim - 1,)), ((), ())), preferred_element_type=dtype)
    if x.size <= FEW_ROWS * x.shape[-1]:
        y = lax.optimization_barrier(y)  # or XLA turns the product round again
    return jnp.moveaxis(y, 0, -1)


@jax.custom_vjp
def _product(x: Float[Array, "*batch m"], weight: Float[Array, "m n"]) -> Float[Array, "*batch n"]:
    return x @ weight


def _product_bwd(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    """dW = x^T dy, or (dy^T x)^T as autodiff writes it always: XLA:CPU copies the left factor of a sum over rows the
    other way round, so that is the narrower one."""
    x, weight = residuals
    rows = tuple(range(x.ndim - 1))
    sums: Any = ((rows, rows), ((), ()))
    of_weight = lax.dot_general(x, dy, sums) if x.shape[-1] <= dy.shape[-1] else lax.dot_general(dy, x, sums).T
    return dy @ weight.T, of_weight


_product.defvjp(lambda x, weight: (x @ weight, (x, weight)), _product_bwd)


def embedded(
    embedding: Float[Array, "v d"], tokens: Tokens, dtype: Any, axes: Sequence[str | None], mesh: Mesh | None
) -> Float[Array, "b t d"]:
    """The embeddings [b t d] of tokens, in `dtype`.

    axes: the logical axes of `tokens`, which say how rows and time are cut over the mesh.

    A device that holds a slice of the width takes it for the tokens of all that hold the others, and one all-to-all
    exchanges width for tokens, as another does for the gradient. Where data cuts the rows too, XLA's partitioner would
    sum the gradient of the whole embedding over all devices.
    """
    if mesh is None or mesh.size == 1:
        return jnp.take(embedding, tokens, axis=0).astype(dtype)
    cuts, rows = sharding.spec(("vocab", "embed"), embedding.shape, mesh), sharding.spec(axes, tokens.shape, mesh)
    vocabulary, width = (sharding.cutting(cut, mesh) for cut in cuts)

    def on_device(embedding: Array, tokens: Array) -> Array:
        place = lax.all_gather(tokens.reshape(-1), width, tiled=True) if width else tokens.reshape(-1)
        if vocabulary:
            place -= lax.axis_index(vocabulary) * len(embedding)
            here = (place >= 0) & (place < len(embedding))
            x = jnp.where(here[:, None], jnp.take(embedding, jnp.where(here, place, 0), axis=0), 0).astype(dtype)
        else:
            x = jnp.take(embedding, place, axis=0).astype(dtype)
        x = lax.all_to_all(x, width, 0, 1, tiled=True) if width else x
        return x.reshape(1, *tokens.shape, -1)

    out = PartitionSpec(vocabulary, *rows, None)
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(cuts, rows), out_specs=out, check_vma=False)
    return jnp.sum(run(embedding, tokens), axis=0)  # out there, or the backward sums states over the vocabulary's axis


def whole(weight: Any) -> Float[Array, "*shape"]:
    """W, or W + A B in the type of W, or a layer of a stack: for experts, the router and caches, which take arrays."""
    if isinstance(weight, OfLayer):
        return weight.value
    if not isinstance(weight, LowRank):
        return weight
    return (weight.weight + weight.a @ weight.b).astype(weight.weight.dtype)
