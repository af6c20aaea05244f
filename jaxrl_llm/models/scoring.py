"""Scores aligned with their tokens: index t is about tokens[:, t]. Only `previous` and `following` shift by one."""

import flax.struct
import jax.numpy as jnp

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, Params, PerToken, SegmentIds, Shaped, Tokens
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.models.selected_logprobs import selected_logprobs
from jaxrl_llm.models.transformer import Model


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
    kept: Integer[Array, "b t m"] | None = None,
    router_logits: bool = False,
    shared_prompt: bool = False,
) -> Scores:
    """One forward over whole answers, padded or packed, whose arguments are those of `Model.apply`.

    log p(token_t | tokens_<t) of softmax(logits / temperature), float32, without materialising the logits. The
    temperature is the rollout's, so that ratios compare the distributions that were sampled from. For the same reason
    the softmax is over the tokens `kept` of those that stood for token t, where the rollout recorded them (-1 for none;
    a token without a record, and None: over all). Source: "Keep Sampling Mask", arXiv 2512.02556, section 3.1.
    """
    out = model.apply(
        params,
        tokens,
        segment_ids=segment_ids,
        routing=routing,
        router_logits=router_logits,
        shared_prompt=shared_prompt,
    )
    head = model.head(params).astype(out.hidden.dtype)

    def of(states: Array, targets: Array, kept: Array | None) -> tuple[PerToken, ...]:
        def flat(x: Array) -> Array:
            return sharding.flat(x, sharding.MICRO_BATCH, model.mesh)

        of_token = {"temperature": temperature, "kept": None if kept is None else flat(kept)}
        scores = selected_logprobs(flat(states), head, flat(targets), **of_token, mesh=model.mesh)
        return tuple(sharding.unflat(x, tokens.shape, sharding.MICRO_BATCH, model.mesh) for x in scores)

    if shared_prompt:
        source = _continued(segment_ids)
        states = jnp.take_along_axis(out.hidden, jnp.maximum(source, 0)[..., None], axis=1)
        logprobs, entropy = (jnp.where(source >= 0, x, 0) for x in of(states, tokens, kept))
    else:
        after = None if kept is None else following(kept)
        logprobs, entropy = (align(x, segment_ids) for x in of(out.hidden, following(tokens), after))
    return Scores(logprobs, entropy, out.hidden, out.routing)


def _continued(segment_ids: SegmentIds) -> Integer[Array, "b t"]:
    """The column of the token that each one continues, -1 for none: the first of an answer continues the prompt."""
    before = jnp.where(first_tokens(segment_ids), -1, jnp.arange(segment_ids.shape[1])[None] - 1)
    last = jnp.sum(segment_ids == 1, axis=1, keepdims=True) - 1
    return jnp.where((before < 0) & (segment_ids > 1), last, before)


def values(head: Params, hidden: Float[Array, "b t d"]) -> PerToken:
    """V of the state AFTER each token; `align` makes it the value before the token."""
    return jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), head["kernel"]) + head["bias"]
