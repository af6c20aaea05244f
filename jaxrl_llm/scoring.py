"""Scores aligned with their tokens: index t is about tokens[:, t].

Every shift by one of scores, masks and tokens is `previous` or `following`.
"""

import flax.struct
import jax.numpy as jnp

from jaxrl_llm.array_typing import Array, Bool, Float, Params, PerToken, SegmentIds, Shaped, Tokens
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.models.selected_logprobs import selected_logprobs
from jaxrl_llm.models.transformer import Model

__all__ = ["Scores", "align", "first_tokens", "following", "previous", "score", "values"]


class Scores(flax.struct.PyTreeNode):
    """logprobs[t] = log p(token_t | tokens_<t) and the entropy of that distribution; 0 at first tokens and padding."""

    logprobs: PerToken
    entropy: PerToken
    hidden: Float[Array, "b t d"]
    routing: Routing | None


def previous(x: Shaped[Array, "b t"]) -> Shaped[Array, "b t"]:
    """x[:, t - 1] at t; 0 or False at the first place of a row."""
    return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


def following(x: Shaped[Array, "b t"]) -> Shaped[Array, "b t"]:
    """x[:, t + 1] at t; 0 or False at the last place of a row."""
    return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)


def first_tokens(segment_ids: SegmentIds) -> Bool[Array, "b t"]:
    """Where nothing precedes a token in its segment; padding counts as such."""
    return (segment_ids == 0) | (segment_ids != previous(segment_ids))


def align(after: PerToken, segment_ids: SegmentIds) -> PerToken:
    """What the state after token t - 1 says of token t; 0 where a segment begins and on padding."""
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
) -> Scores:
    """One forward over whole answers, padded or packed.

    log p(token_t | tokens_<t) of softmax(logits / temperature), float32, without materialising the logits.

    Args:
      tokens, segment_ids: [b t]; segment 0 is padding.
      routing: experts (and logits) to replay.
      temperature: of the rollout, so that ratios compare the distributions that were sampled from.
      router_logits: keep the router's own logits in `Scores.routing`.
    """
    out = model.apply(params, tokens, segment_ids=segment_ids, routing=routing, router_logits=router_logits)
    head = model.head(params).astype(out.hidden.dtype)
    states = out.hidden.reshape(-1, out.hidden.shape[-1])
    flat = selected_logprobs(states, head, following(tokens).ravel(), temperature=temperature, mesh=model.mesh)
    logprobs, entropy = (align(x.reshape(tokens.shape), segment_ids) for x in flat)
    return Scores(logprobs, entropy, out.hidden, out.routing)


def values(head: Params, hidden: Float[Array, "b t d"]) -> PerToken:
    """V of the state AFTER each token; `align` makes it the value before the token."""
    return jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), head["kernel"]) + head["bias"]
