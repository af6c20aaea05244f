"""Arithmetic of an exact forward on a TPU: Pallas kernels whose blocks have one size, however many rows there are.

XLA fuses and tiles an operation by what stands around it, and with it the order of a sum. A kernel is one program for
each width of its rows: the result of a row depends neither on its place in a block nor on the other rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_llm.ground.array_typing import Array, Float, Integer
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.exact.exact_attention import attend_columns
from jaxrl_llm.models.exact.tiles import HIDDEN, Tiles, in_tiles
from jaxrl_llm.models.experts.expert_blocks import group_by_expert
from jaxrl_llm.models.experts.triton_matmul import tiles_of

_ROWS = 128  # of a block of a product
_FEW = 16  # rows of a block that holds them whole
_ACROSS = 512  # columns of a block of a product
_LONG = 1024  # the longest axis that one block holds; a longer one is a multiple of 128
_SCORED = 2048  # logits of a row in a block
_MOST = 1024  # rows that `in_tiles` takes at a time: their logits exist at once
_MEMORY = 2**24  # bytes of a head's keys and values


@dataclasses.dataclass(frozen=True)
class KernelTiles(Tiles):
    """interpret: run the kernels as plain JAX, on any platform."""

    interpret: bool = False
    columns: ClassVar[int] = 128

    @classmethod
    def of(cls, config: ModelConfig) -> "KernelTiles":
        """Raises ValueError: no kernel is written for a part or a size of the model."""
        for name in ("sliding_window", "attention_sinks", "rope_interleave"):
            if value := getattr(config, name):
                raise ValueError(
                    f"model.numerics=exact on a TPU has no kernel for model.{name}={value}; set model.numerics=fast"
                )
        widths = {
            "model.hidden_size": config.hidden_size,
            "model.num_attention_heads x head_dim": config.num_attention_heads * config.head_dim,
            "model.intermediate_size": config.intermediate_size,
            "model.moe_intermediate_size": config.moe_intermediate_size,
            "model.shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        }
        for name, width in widths.items():
            if width > _LONG and width % 128:
                raise ValueError(
                    f"model.numerics=exact on a TPU multiplies by matrices of at most {_LONG} rows, or of a multiple "
                    f"of 128, and {name} is {width}; set model.numerics=fast"
                )
        return cls()

    def in_tiles(self, function: Callable[..., Any], *rows: Any) -> Any:
        """The rows are padded to whole blocks."""
        count = len(jax.tree.leaves(rows)[0])
        size = -(-count // -(-count // _MOST))
        return in_tiles(function, *rows, size=size + -size % _ROWS)

    def without_kernel(self, function: Callable[..., Any], *rows: Any) -> Any:
        """By XLA, at one number of rows."""
        return in_tiles(function, *rows, size=_ROWS)

    def held(self, weight: Array, dtype: Any) -> Array:
        return weight.astype(dtype)

    def rounded(self, x: Array, dtype: Any) -> Array:
        """In a kernel, where no conversion is left out; outside of one, x is rounded already."""
        return x.astype(dtype).astype(jnp.float32)

    def by_row(self, function: Callable[..., Any], rows: tuple[Array, ...], *others: Array) -> Any:
        def kernel(*refs: Any) -> None:
            *given, out = refs
            out[...] = function(*(ref[...] for ref in given))

        def block(x: Any) -> pl.BlockSpec:
            return pl.BlockSpec((_FEW, *x.shape[1:]), lambda i: (i, *[0] * (x.ndim - 1)))

        out = jax.eval_shape(function, *rows, *others)
        return pl.pallas_call(
            kernel,
            out_shape=out,
            grid=(out.shape[0] // _FEW,),
            in_specs=[*map(block, rows), *(pl.BlockSpec(x.shape, lambda i, x=x: (0,) * x.ndim) for x in others)],
            out_specs=block(out),
            interpret=self.interpret,
        )(*rows, *others)

    def product(self, x: Float[Array, "n d"], weight: Float[Array, "d f"], dtype: Any) -> Float[Array, "n f"]:
        return self._products(x, weight[None], jnp.zeros(len(x) // _ROWS, jnp.int32), dtype)

    def _products(self, x: Array, weights: Float[Array, "e d f"], group: Integer[Array, " m"], dtype: Any) -> Array:
        """x W_e, e the group of a block of rows. Sums run over blocks of the inner axis, in their order."""
        (n, d), f = x.shape, weights.shape[2]
        inner, across = d if d <= _LONG else next(b for b in (512, 256, 128) if d % b == 0), min(f, _ACROSS)
        blocks, kind = d // inner, weights.dtype
        precision = jax.lax.Precision.HIGHEST if kind == jnp.float32 else jax.lax.Precision.DEFAULT

        def kernel(_: Any, x: Any, weight: Any, out: Any, total: Any) -> None:
            @pl.when(pl.program_id(2) == 0)
            def _() -> None:
                total[...] = jnp.zeros_like(total)

            dot = functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)
            total[...] += dot(x[...].astype(kind), weight[0])

            @pl.when(pl.program_id(2) == blocks - 1)
            def _() -> None:
                out[...] = self.rounded(total[...], dtype)

        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((n, f), jnp.float32),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(n // _ROWS, pl.cdiv(f, across), blocks),
                in_specs=[
                    pl.BlockSpec((_ROWS, inner), lambda i, j, k, group: (i, k)),
                    pl.BlockSpec((1, inner, across), lambda i, j, k, group: (group[i], k, j)),
                ],
                out_specs=pl.BlockSpec((_ROWS, across), lambda i, j, k, group: (i, j)),
                scratch_shapes=[pltpu.VMEM((_ROWS, across), jnp.float32)],
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            interpret=self.interpret,
        )(group, x, weights)

    def experts(
        self, x: Float[Array, "n d"], experts: Integer[Array, "n k"], weights: tuple[Array, ...], dtype: Any
    ) -> Float[Array, "n k d"]:
        """Each expert's rows are padded to whole blocks."""
        gate, up, down = weights
        groups = group_by_expert(experts, len(gate))
        tiles = tiles_of(groups.counts, experts.size, _ROWS)
        row = tiles.start[:, None] + jnp.arange(_ROWS)[None]
        row = jnp.where(row < tiles.stop[:, None], row, 0).reshape(-1)  # what belongs to no pair is not read
        rows = x[groups.order[row] // experts.shape[1]]
        a, b = (self._products(rows, weight, tiles.group, jnp.float32) for weight in (gate, up))
        h = self.by_row(lambda a, b: self.rounded(jax.nn.silu(a) * b, dtype), (a, b))
        out = self._products(h, down, tiles.group, jnp.float32)
        blocks = -(-groups.counts // _ROWS)
        first, of = (jnp.cumsum(blocks) - blocks) * _ROWS, experts.reshape(-1).astype(jnp.int32)
        return out[first[of] + groups.rank - groups.starts[of]].reshape(*experts.shape, -1)

    def log_softmax(
        self, logits: Float[Array, "n v"], of_target: Float[Array, "n"]
    ) -> tuple[Float[Array, "n"], Float[Array, "n"], Float[Array, "n"]]:
        """Online, over blocks of columns in their order."""
        log_partition, mean = self._partition(logits)
        return of_target - log_partition, log_partition - mean, log_partition

    def _partition(self, logits: Float[Array, "n v"]) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
        """Return the log of the partition sum, and the mean of the logits under their softmax."""
        n, v = logits.shape
        wide = min(v, _SCORED)
        blocks = pl.cdiv(v, wide)

        def kernel(logits: Any, log_partition: Any, mean: Any, top: Any, total: Any, weighted: Any) -> None:
            block = pl.program_id(1)

            @pl.when(block == 0)
            def _() -> None:
                top[...] = jnp.full_like(top, HIDDEN)
                total[...] = weighted[...] = jnp.zeros_like(total)

            here = block * wide + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) < v
            x = jnp.where(here, logits[...], -jnp.inf)
            most = jnp.maximum(top[...], jnp.max(x, axis=-1, keepdims=True))
            weights, kept = jnp.exp(x - most), jnp.exp(top[...] - most)
            top[...] = most
            total[...] = total[...] * kept + jnp.sum(weights, axis=-1, keepdims=True)
            terms = jnp.where(weights > 0, weights * x, 0)
            weighted[...] = weighted[...] * kept + jnp.sum(terms, axis=-1, keepdims=True)

            @pl.when(block == blocks - 1)
            def _() -> None:
                log_partition[...] = jnp.log(total[...]) + top[...]
                mean[...] = weighted[...] / total[...]

        column = pl.BlockSpec((_FEW, 1), lambda i, j: (i, 0))
        sums = pl.pallas_call(
            kernel,
            out_shape=[jax.ShapeDtypeStruct((n, 1), jnp.float32)] * 2,
            grid=(n // _FEW, blocks),
            in_specs=[pl.BlockSpec((_FEW, wide), lambda i, j: (i, j))],
            out_specs=[column] * 2,
            scratch_shapes=[pltpu.VMEM((_FEW, 1), jnp.float32)] * 3,
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
            interpret=self.interpret,
        )(logits)
        return sums[0][:, 0], sums[1][:, 0]

    def attend(
        self,
        q: Float[Array, "n h d"],
        keys: Float[Array, "b kv s d"],
        values: Float[Array, "b kv s d"],
        first: Integer[Array, "b t"] | None,
        shared: Integer[Array, "b t"] | None,
        count: Integer[Array, "b t"],
        window: Integer[Array, "b t"] | None = None,
        sinks: Float[Array, " h"] | None = None,
    ) -> Float[Array, "n x"]:
        del window, sinks  # refused by `of`
        held = 2 * 4 * keys.shape[2] * keys.shape[3]
        if held > _MEMORY:
            raise ValueError(
                f"model.numerics=exact on a TPU keeps the keys and values of a head in {_MEMORY >> 20} MiB, and those "
                f"of a row of {keys.shape[2]} tokens take {held >> 20}; shorten the rows, or set model.numerics=fast"
            )
        width, interpret = self.columns, self.interpret
        return attend_columns(q, keys, values, first, shared, count, width=width, interpret=interpret)
