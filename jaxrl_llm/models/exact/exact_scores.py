"""The final norm, and log-probs of given tokens: one formula for those that are drawn and those that are scored."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.ground.array_typing import Array, Float, Integer
from jaxrl_llm.models.exact.exact_block import normalised
from jaxrl_llm.models.exact.tiles import Tiles, on_rows
from jaxrl_llm.models.layers import normalise
from jaxrl_llm.models.softmax import OUT


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def exact_norm(
    x: Float[Array, "b t d"], scale: Float[Array, " d"], eps: float, how: Tiles, mesh: Mesh | None, axis: str
) -> Float[Array, "b t d"]:
    """`RMSNorm` in tiles, of rows with this logical axis; its backward is that of the plain one."""

    def forward(scale: Array, x: Array) -> Array:
        def of_tile(rows: Array) -> Array:
            return normalised(how, how.rounded(rows, x.dtype), scale, eps, x.dtype)

        return how.in_tiles(of_tile, x.reshape(-1, x.shape[-1])).reshape(x.shape).astype(x.dtype)

    return on_rows(forward, mesh, axis, (x,), scale)


def _norm_fwd(x: Array, scale: Array, *how: Any) -> tuple[Array, tuple[Array, Array]]:
    return exact_norm(x, scale, *how), (x, scale)


def _norm_bwd(
    eps: float, how: Tiles, mesh: Mesh | None, axis: str, residuals: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    del how, mesh, axis
    return jax.vjp(lambda x, scale: normalise(x, scale, eps), *residuals)[1](cotangent)


exact_norm.defvjp(_norm_fwd, _norm_bwd)


def exact_scores(
    how: Tiles,
    hidden: Float[Array, "n d"],
    head: Float[Array, "d v"],
    targets: Integer[Array, "n"],
    kept: Integer[Array, "n m"] | None,
    temperature: float,
) -> tuple[Float[Array, "n"], ...]:
    """Log-probs of the targets, entropies and the logs of the partition sums; kept as in `selected_logprobs`."""
    weight = how.held(head, hidden.dtype)

    def of_tile(hidden: Array, targets: Array, kept: Array | None) -> tuple[Array, ...]:
        logits = jax.lax.optimization_barrier(exact_logits(how, hidden, weight) / temperature)
        return of_logits(how, logits, targets, kept)

    return how.in_tiles(of_tile, hidden, targets, kept)


def exact_logits(how: Tiles, hidden: Float[Array, "n d"], weight: Float[Array, "d v"]) -> Float[Array, "n v"]:
    """Logits of one tile; the weight as `Tiles.held` gives it."""
    return how.product(hidden.astype(jnp.float32), weight, jnp.float32)


def of_logits(
    how: Tiles, logits: Float[Array, "n v"], targets: Integer[Array, "n"], kept: Integer[Array, "n m"] | None
) -> tuple[Float[Array, "n"], ...]:
    """The results of `exact_scores`, from logits at their temperature. A sum over tokens that were kept follows their
    order, which is the sampler's."""
    of_target = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    found = how.log_softmax(logits, of_target)
    if kept is None:
        return found
    held = jnp.where(kept < 0, OUT, jnp.take_along_axis(logits, jnp.maximum(kept, 0), axis=-1))
    none = jnp.all(kept < 0, axis=-1)
    of_kept = how.log_softmax(jnp.where(none[:, None], 0, held), of_target)
    return tuple(jnp.where(none, whole, cut) for whole, cut in zip(found, of_kept, strict=True))
