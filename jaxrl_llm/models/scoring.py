"""Scores aligned with their tokens: index t is about tokens[:, t]. Only `previous` and `following` shift by one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax.numpy as jnp

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import (
    Array,
    Bool,
    Float,
    Integer,
    Mask,
    Params,
    PerToken,
    SegmentIds,
    Shaped,
    Tokens,
)
from jaxrl_llm.models.architecture import Rows
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.models.selected_logprobs import selected_logprobs
from jaxrl_llm.models.transformer import Model

_ALL = 2**22  # logits up to which the head scores every token: there are too few to be worth a choice


class Read(NamedTuple):
    """What is read of the scores, where it is not those of every token over the whole vocabulary.

    mask: the tokens whose scores are read; None: all.
    kept: as in a `Trajectory`, the tokens that the sampler chose token t from, -1 for none: the softmax is over those
      (a token without a record, and None: over all). Source: "Keep Sampling Mask", arXiv 2512.02556, section 3.1.
    """

    mask: Mask | None = None
    kept: Integer[Array, "b t m"] | None = None


EVERY = Read()


class Scores(flax.struct.PyTreeNode):
    """logprobs[t] = log p(token_t | tokens_<t) and the entropy of that distribution; 0 at first tokens and padding."""

    logprobs: PerToken
    entropy: PerToken
    hidden: Float[Array, "b t d"]
    routing: Routing | None


def previous(x: Shaped[Array, "b t"]) -> Shaped[Array, "b t"]:
    """x[:, t - 1] at t; 0 or False at the first place of a row."""
    return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


def following(x: Shaped[Array, "b t *rest"]) -> Shaped[Array, "b t *rest"]:
    """x[:, t + 1] at t; 0 or False at the last place of a row."""
    return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)


def first_tokens(segment_ids: SegmentIds) -> Bool[Array, "b t"]:
    """Where nothing precedes a token in its segment, and padding."""
    return (segment_ids == 0) | (segment_ids != previous(segment_ids))


def align(after: PerToken, segment_ids: SegmentIds) -> PerToken:
    """Moves a score of the state after token t - 1 to token t; 0 where a segment begins and on padding."""
    return jnp.where(first_tokens(segment_ids), 0, previous(after))


def score(
    model: Model,
    params: Params,
    tokens: Tokens,
    segment_ids: SegmentIds,
    *,
    routing: Routing | None = None,
    temperature: float = 1.0,
    router_logits: bool = False,
    rows: Rows = "packed",
    read: Read = EVERY,
    most: int = 0,
) -> Scores:
    """One forward over whole answers, padded or packed, whose arguments are those of `Model.apply`.

    log p(token_t | tokens_<t) of softmax(logits / temperature), float32, without materialising the logits. The
    temperature is the rollout's, so that ratios compare the distributions that were sampled from.

    Args:
      most: of the tokens that are read in a row; 0: all of them may be.
    """
    out = model.apply(
        params,
        tokens,
        segment_ids=segment_ids,
        routing=routing,
        router_logits=router_logits,
        rows=rows,
    )
    head = model.head(params).astype(out.hidden.dtype)

    def of(states: Array, targets: Array, kept: Array | None) -> tuple[PerToken, ...]:
        def flat(x: Array) -> Array:
            return sharding.flat(x, sharding.MICRO_BATCH, model.mesh)

        of_token = {"temperature": temperature, "kept": None if kept is None else flat(kept)}
        scores = selected_logprobs(flat(states), head, flat(targets), **of_token, mesh=model.mesh)
        return tuple(sharding.unflat(x, targets.shape, sharding.MICRO_BATCH, model.mesh) for x in scores)

    some = 0 < most < tokens.shape[1] and tokens.size * head.shape[1] > _ALL
    if read.mask is not None and some and sharding.shards("time", model.mesh) == 1:
        logprobs, entropy = _of_some(of, out.hidden, tokens, read, _source(segment_ids, rows), most)
    elif rows == "shared":
        source = _source(segment_ids, rows)
        states = jnp.take_along_axis(out.hidden, jnp.maximum(source, 0)[..., None], axis=1)
        logprobs, entropy = (jnp.where(source >= 0, x, 0) for x in of(states, tokens, read.kept))
    else:
        after = None if read.kept is None else following(read.kept)
        logprobs, entropy = (align(x, segment_ids) for x in of(out.hidden, following(tokens), after))
    return Scores(logprobs, entropy, out.hidden, out.routing)


def _of_some(
    of: Callable[[Array, Array, Array | None], tuple[PerToken, ...]],
    hidden: Float[Array, "b t d"],
    tokens: Tokens,
    read: Read,
    source: Integer[Array, "b t"],
    most: int,
) -> tuple[PerToken, ...]:
    """The scores `of` the tokens that are read alone, at most so many in a row; 0 elsewhere."""

    def at(x: Array, columns: Array) -> Array:
        return jnp.take_along_axis(x, columns.reshape(*columns.shape, *[1] * (x.ndim - 2)), axis=1)

    wanted: Any = read.mask
    columns = jnp.argsort(~wanted, axis=1)[:, :most]  # stable: those that are read, in order
    kept = None if read.kept is None else at(read.kept, columns)
    found = of(at(hidden, jnp.maximum(at(source, columns), 0)), at(tokens, columns), kept)
    place = jnp.clip(jnp.cumsum(wanted, axis=1) - 1, 0, most - 1)
    return tuple(jnp.where(wanted & (source >= 0), at(x, place), 0) for x in found)


def _source(segment_ids: SegmentIds, rows: Rows) -> Integer[Array, "b t"]:
    """The column of the token that each one continues, -1 for none: the first of an answer continues a prompt that it
    shares."""
    before = jnp.where(first_tokens(segment_ids), -1, jnp.arange(segment_ids.shape[1])[None] - 1)
    if rows != "shared":
        return before
    last = jnp.sum(segment_ids == 1, axis=1, keepdims=True) - 1
    return jnp.where((before < 0) & (segment_ids > 1), last, before)


def values(head: Params, hidden: Float[Array, "b t d"]) -> PerToken:
    """V of the state AFTER each token; `align` makes it the value before the token."""
    return jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), head["kernel"]) + head["bias"]
