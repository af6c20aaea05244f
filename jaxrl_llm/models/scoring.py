"""Scores aligned with their tokens: index t is about tokens[:, t]. Only `previous` and `following` shift by one."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
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
    """Return a mask of tokens that nothing precedes in their segment, and of padding."""
    return (segment_ids == 0) | (segment_ids != previous(segment_ids))


def align(after: PerToken, segment_ids: SegmentIds) -> PerToken:
    """Move a score of the state after token t - 1 to token t.

    Args:
      after: [b t], of the state after each token.

    Returns:
      [b t], of the state before each token; 0 where a segment begins and on padding.
    """
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
    mask: Mask | None = None,
    kept: Integer[Array, "b t m"] | None = None,
    most: int = 0,
) -> Scores:
    """One forward over whole answers, padded or packed, whose arguments are those of `Model.apply`.

    log p(token_t | tokens_<t) of softmax(logits / temperature), float32, without materialising the logits. The
    temperature is the rollout's, so that ratios compare the distributions that were sampled from.

    Args:
      tokens, segment_ids: [b t], left-aligned answers with their prompts; segment 0 is padding.
      temperature: of the rollout, above 0.
      mask: [b t], the tokens whose scores are read; None: all.
      kept: [b t m], as in a `Rollout`, the tokens that the sampler chose token t from, -1 for none: the softmax is over
        those (a token without a record, and None: over all). Source: "Keep Sampling Mask", arXiv 2512.02556, section
        3.1.
      most: tokens of the mask in a row; 0: all may be.

    Returns:
      `Scores`: log-probs and entropies [b t] in float32, hidden states [b t d] in the model's dtype, and the routing
      [l b t k] that the pass used (None for a dense model).

    Raises:
      ValueError: the temperature is not positive, or as of `Model.apply`.
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
    divisor = temperature * model.config.logits_scaling

    def of(states: Array, targets: Array, kept: Array | None) -> tuple[PerToken, ...]:
        def flat(x: Array) -> Array:
            return sharding.flat(x, sharding.MICRO_BATCH, model.mesh)

        of_token = {"temperature": divisor, "kept": None if kept is None else flat(kept)}
        scores = selected_logprobs(
            flat(states), head, flat(targets), **of_token, mesh=model.mesh, exact=model.kernels.exact
        )
        return tuple(sharding.unflat(x, targets.shape, sharding.MICRO_BATCH, model.mesh) for x in scores)

    some = 0 < most < tokens.shape[1] and tokens.size * head.shape[1] > _ALL
    if mask is not None and some and sharding.shards("time", model.mesh) == 1:
        logprobs, entropy = of_some(of, out.hidden, tokens, mask, kept, source_of(segment_ids, rows), most)
    elif rows == "shared":
        source = source_of(segment_ids, rows)
        states = jnp.take_along_axis(out.hidden, jnp.maximum(source, 0)[..., None], axis=1)
        logprobs, entropy = (jnp.where(source >= 0, x, 0) for x in of(states, tokens, kept))
    else:
        after = None if kept is None else following(kept)
        logprobs, entropy = (align(x, segment_ids) for x in of(out.hidden, following(tokens), after))
    return Scores(logprobs, entropy, out.hidden, out.routing)


def of_some(
    of: Callable[[Any, Array, Array | None], tuple[PerToken, ...]],
    hidden: Any,
    tokens: Tokens,
    wanted: Mask,
    kept: Integer[Array, "b t m"] | None,
    source: Integer[Array, "b t"],
    most: int,
) -> tuple[PerToken, ...]:
    """The scores `of` the wanted tokens alone, at most so many in a row.

    Args:
      of: (hidden states [b most d], targets [b most], kept [b most m]) -> scores [b most] each.
      hidden: [b t d], or a tree of such.
      wanted: [b t], true at most `most` times in a row.
      source: [b t], as `source_of` gives it.

    Returns:
      Each of the scores in [b t]; 0 at tokens that are not wanted.
    """

    def at(x: Array, columns: Array) -> Array:
        return jnp.take_along_axis(x, columns.reshape(*columns.shape, *[1] * (x.ndim - 2)), axis=1)

    columns = jnp.argsort(~wanted, axis=1)[:, :most]  # stable: in order
    kept = None if kept is None else at(kept, columns)
    before = jnp.maximum(at(source, columns), 0)
    found = of(jax.tree.map(lambda x: at(x, before), hidden), at(tokens, columns), kept)
    place = jnp.clip(jnp.cumsum(wanted, axis=1) - 1, 0, most - 1)
    return tuple(jnp.where(wanted & (source >= 0), at(x, place), 0) for x in found)


def source_of(segment_ids: SegmentIds, rows: Rows) -> Integer[Array, "b t"]:
    """The column of the token that each one continues, -1 for none: the first of an answer continues a prompt that it
    shares."""
    before = jnp.where(first_tokens(segment_ids), -1, jnp.arange(segment_ids.shape[1])[None] - 1)
    if rows != "shared":
        return before
    last = jnp.sum(segment_ids == 1, axis=1, keepdims=True) - 1
    return jnp.where((before < 0) & (segment_ids > 1), last, before)


def values(head: Params, hidden: Float[Array, "b t d"]) -> PerToken:
    """The value of the state AFTER each token; `align` makes it the value before the token.

    Args:
      head: {"kernel": [d], "bias": []}.

    Returns:
      [b t], float32.
    """
    return jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), head["kernel"]) + head["bias"]
