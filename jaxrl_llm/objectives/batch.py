"""The arrays that an objective reads, checked once, and the answers inside them.

An answer is a row, or in packed rows the tokens with one id. Functions that look at whole answers take
  mask: [b t], True on the tokens that count (EOS included);
  sequence_ids: integers [b t], from 0 to num_sequences - 1, for packed rows; None if every row is one answer;
  num_sequences: static int, b t if None; read only with sequence_ids.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, Mask, PerToken
from jaxrl_llm.ground.masking import segment_sum
from jaxrl_llm.ground.ranges import suggestion

Ids = Integer[Array, "b t"] | None
PerSequence = Float[Array, "s"]

_DIFFERENTIATED = ("logprobs", "values", "entropy", "scores", "teacher_divergence")
_POLICIES = ("old_logprobs", "ref_logprobs", "sampler_logprobs", "teacher_logprobs")
_DETACHED = (*_POLICIES, "age", "old_values", "returns", "margins")
_TOKEN_ARRAYS = (*_DIFFERENTIATED, *_DETACHED)  # [b t]
_ROUTER_ARRAYS = ("router_logprobs", "old_router_logprobs")  # [l b t k]
ARRAYS = frozenset([*_TOKEN_ARRAYS, *_ROUTER_ARRAYS, "advantages", "mask", "sequence_ids"])


def clamp(x: Float[Array, "*any"], bound: float) -> Float[Array, "*any"]:
    """x inside [-bound, bound], the bound outside, with gradient exactly 0 outside (and exactly 1 on the bound)."""
    return jnp.where(jnp.abs(x) <= bound, x, jax.lax.stop_gradient(jnp.clip(x, -bound, bound)))


def token_log_ratio(logprobs: PerToken, other: PerToken, mask: Mask) -> PerToken:
    """log p(y_t) - log q(y_t) of two policies p and q, which is safe to exponentiate: 0 where masked, then clamped.

    The clamp is at +-20, because exp(20)^2 summed over 1e20 tokens is still a float32; outside the gradient is 0.
    """
    return clamp(jnp.where(mask, logprobs - other, 0), 20.0)


def sequence_sum(x: PerToken, mask: Mask, sequence_ids: Ids = None, num_sequences: int | None = None) -> PerSequence:
    """Sum over the unmasked tokens of each answer, [b t] -> [s]."""
    if sequence_ids is None:
        return jnp.sum(x, axis=1, where=mask)
    return segment_sum(x, mask, sequence_ids, num_sequences or mask.size)


def sequence_mean(x: PerToken, mask: Mask, sequence_ids: Ids = None, num_sequences: int | None = None) -> PerSequence:
    """Mean over the unmasked tokens of each answer, [b t] -> [s]; 0 for an empty one."""
    where = (mask, sequence_ids, num_sequences)
    return sequence_sum(x, *where) / jnp.maximum(sequence_sum(jnp.ones_like(x), *where), 1)


def to_tokens(x: PerSequence, mask: Mask, sequence_ids: Ids = None) -> PerToken:
    """The number of its answer at every token, [s] -> [b t]."""
    if sequence_ids is None:
        return jnp.broadcast_to(x[:, None], mask.shape)
    return x[jnp.clip(sequence_ids, 0, x.shape[0] - 1)]


def mean_of_answer(x: PerToken, mask: Mask, sequence_ids: Ids = None, num_sequences: int | None = None) -> PerToken:
    """The mean over the unmasked tokens of its answer at every token, [b t]."""
    return to_tokens(sequence_mean(x, mask, sequence_ids, num_sequences), mask, sequence_ids)


def occupied(mask: Mask, sequence_ids: Ids = None, num_sequences: int | None = None) -> Bool[Array, "s"]:
    """Which answers have an unmasked token, [b t] -> [s]."""
    return sequence_sum(jnp.ones(mask.shape), mask, sequence_ids, num_sequences) > 0


def last_tokens(mask: Mask, sequence_ids: Ids = None, num_sequences: int | None = None) -> Mask:
    """True at the last unmasked token of each answer, [b t]."""
    place = jnp.arange(mask.size).reshape(mask.shape)
    marked = jnp.where(mask, place, -1)
    if sequence_ids is None:
        return mask & (place == jnp.max(marked, axis=1, keepdims=True))
    count = num_sequences or mask.size
    ids = jnp.clip(sequence_ids, 0, count - 1)
    return mask & (place == jax.ops.segment_max(marked.ravel(), ids.ravel(), count)[ids])


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """One batch of answers, as `Batch.of` builds it: what is not differentiated is detached.

    All are [b t], but for the router's log-probs [l b t k]. `advantages` and `log_ratio` are 0 where masked; the other
    arrays may hold anything there, NaN too: read them by `masked`. `mask` may have gaps inside an answer, as between
    turns, and a packed row holds several answers, so the token at t - 1 may be masked or of another answer.
    """

    logprobs: PerToken
    old_logprobs: PerToken
    advantages: PerToken
    mask: Mask
    num_sequences: int
    sequence_ids: Ids = None
    ref_logprobs: PerToken | None = None
    sampler_logprobs: PerToken | None = None
    teacher_logprobs: PerToken | None = None
    teacher_divergence: PerToken | None = None  # over the vocabulary, at the state before the token
    age: PerToken | None = None  # steps trained since the policy that sampled the token, 0 for the present one
    values: PerToken | None = None
    old_values: PerToken | None = None
    returns: PerToken | None = None
    entropy: PerToken | None = None
    scores: PerToken | None = None
    margins: PerToken | None = None
    router_logprobs: Float[Array, "l b t k"] | None = None
    old_router_logprobs: Float[Array, "l b t k"] | None = None

    @classmethod
    def of(cls, needs: frozenset[str] = frozenset(), *, num_sequences: int | None = None, **arrays: Any) -> "Batch":
        """Check and convert; ValueError if an array is unknown, missing, or would broadcast into another shape."""
        given = {name: jnp.asarray(x) for name, x in arrays.items() if x is not None}
        for name in arrays:
            if name not in ARRAYS:
                raise ValueError(f"unknown array {name!r}{suggestion(name, ARRAYS)}; pass {', '.join(sorted(ARRAYS))}")
        missing = sorted(({"logprobs", "old_logprobs", "advantages", "mask"} | needs) - set(given))
        if missing:
            raise ValueError(f"this objective needs {', '.join(missing)}; pass what objective.needs lists")
        shape = given["logprobs"].shape
        if len(shape) != 2:
            raise ValueError(f"logprobs has shape {shape}; give [b t], one row an answer")
        packed = "sequence_ids" in given
        _check_shapes(given, shape, packed)
        mask, ids = given.pop("mask"), given.pop("sequence_ids", None)
        if mask.dtype != jnp.bool_:
            raise ValueError(f"mask has dtype {mask.dtype}; give booleans, for example mask > 0")
        if ids is not None and not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"sequence_ids has dtype {ids.dtype}; give integers")
        count = num_sequences if num_sequences is not None else (shape[0] * shape[1] if packed else shape[0])
        _check_ids(ids, mask, count, shape)
        if given["advantages"].ndim == 1:
            given["advantages"] = jnp.broadcast_to(given["advantages"][:, None], shape)
        for name, x in given.items():
            x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            given[name] = x if name in _DIFFERENTIATED else jax.lax.stop_gradient(x)
        given["advantages"] = jnp.where(mask, given["advantages"], 0)
        return cls(mask=mask, sequence_ids=ids, num_sequences=count, **given)

    def detached(self) -> "Batch":
        """The same batch with all gradients stopped (for metrics)."""
        names = [name for name in _DIFFERENTIATED if getattr(self, name) is not None]
        return dataclasses.replace(self, **{name: jax.lax.stop_gradient(getattr(self, name)) for name in names})

    def require(self, name: str) -> Array:
        """The array `name`, which a part declared in its `needs`."""
        array = getattr(self, name)
        if array is None:
            raise ValueError(f"{name} is missing; a part that reads it must list it in `needs`")
        return array

    def masked(self, name: str) -> PerToken:
        """The array `name` [b t], which a part declared in its `needs`, 0 where masked."""
        return jnp.where(self.mask, self.require(name), 0)

    @functools.cached_property
    def log_ratio(self) -> PerToken:
        """log r = log pi_theta - log pi_old by token, as `token_log_ratio` gives it."""
        return token_log_ratio(self.logprobs, self.old_logprobs, self.mask)

    @property
    def sequences(self) -> tuple[Mask, Ids, int]:
        """The three arguments that tell the functions above where the answers are."""
        return self.mask, self.sequence_ids, self.num_sequences

    @functools.cached_property
    def lengths(self) -> PerSequence:
        """|y_i|: the unmasked tokens of each answer, EOS included."""
        return sequence_sum(jnp.ones_like(self.logprobs), *self.sequences)


def _check_shapes(given: dict[str, Array], shape: tuple[int, ...], packed: bool) -> None:
    for name in [*_TOKEN_ARRAYS, "mask", "sequence_ids"]:
        if name in given and given[name].shape != shape:
            raise ValueError(f"{name} has shape {given[name].shape}, logprobs {shape}; give both as [b t]")
    got = given["advantages"].shape
    if len(got) == 1 and packed:
        raise ValueError("advantages [b] cannot serve packed rows; give [b t], each token its own answer's advantage")
    if got != shape and got != shape[:1]:
        raise ValueError(
            f"advantages has shape {got}, logprobs {shape}; give [b t], or one number an answer, [b]={shape[:1]}"
        )
    routers = [given[name].shape for name in _ROUTER_ARRAYS if name in given]
    for got in routers:
        if len(got) != 4 or got[1:3] != shape or got != routers[0]:
            raise ValueError(f"router log-probs have shape {got}, logprobs {shape}; give both as [l b t k]")


def _check_ids(ids: Array | None, mask: Array, count: int, shape: tuple[int, ...]) -> None:
    if ids is None:
        if count != shape[0]:
            raise ValueError(
                f"num_sequences={count} without sequence_ids must be the rows, {shape[0]}; pass sequence_ids"
            )
    elif not isinstance(ids, Tracer) and not isinstance(mask, Tracer):
        used = np.asarray(ids)[np.asarray(mask)]
        if used.size and not 0 <= used.min() <= used.max() < count:
            raise ValueError(
                f"sequence_ids run from {used.min()} to {used.max()}, num_sequences={count}; number sequences from 0"
            )
