"""Scores aligned with their tokens: index t speaks of tokens[:, t]. The only place that shifts by one."""

import flax.struct
import jax.numpy as jnp

from jaxrl_llm.array_typing import Array, Bool, Float, Params, PerToken, SegmentIds, Tokens
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.models.selected_logprobs import selected_logprobs
from jaxrl_llm.models.transformer import Model

__all__ = ["Scores", "align", "first_tokens", "score", "score_hidden", "values"]


class Scores(flax.struct.PyTreeNode):
    """logprobs[t] = log p(token_t | tokens_<t) and the entropy of that distribution; 0 at first tokens and padding."""

    logprobs: PerToken
    entropy: PerToken
    hidden: Float[Array, "b t d"]
    routing: Routing | None


def first_tokens(segment_ids: SegmentIds) -> Bool[Array, "b t"]:
    """Where nothing precedes a token in its segment; padding counts as such."""
    before = jnp.concatenate([jnp.zeros_like(segment_ids[:, :1]), segment_ids[:, :-1]], axis=1)
    return (segment_ids == 0) | (segment_ids != before)


def align(after: PerToken, segment_ids: SegmentIds) -> PerToken:
    """What the state after token t - 1 says of token t: a shift by one, 0 where a segment begins and on padding."""
    shifted = jnp.concatenate([jnp.zeros_like(after[:, :1]), after[:, :-1]], axis=1)
    return jnp.where(first_tokens(segment_ids), 0, shifted)


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
      router_logits: keep the router's fresh logits in `Scores.routing`.
    """
    out = model.apply(params, tokens, segment_ids=segment_ids, routing=routing, router_logits=router_logits)
    logprobs, entropy = score_hidden(model, params, out.hidden, tokens, segment_ids, temperature)
    return Scores(logprobs, entropy, out.hidden, out.routing)


def score_hidden(
    model: Model, params: Params, hidden: Array, tokens: Tokens, segment_ids: SegmentIds, temperature: float
) -> tuple[PerToken, PerToken]:
    """Log-probs and entropies from final hidden states."""
    targets = jnp.concatenate([tokens[:, 1:], jnp.zeros_like(tokens[:, :1])], axis=1)
    head = model.head(params).astype(hidden.dtype)
    flat = selected_logprobs(hidden.reshape(-1, hidden.shape[-1]), head, targets.ravel(), temperature=temperature)
    logprobs, entropy = (align(x.reshape(tokens.shape), segment_ids) for x in flat)
    return logprobs, entropy


def values(head: Params, hidden: Float[Array, "b t d"]) -> PerToken:
    """V of the state AFTER each token; `align` makes it the value before the token."""
    return jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), head["kernel"]) + head["bias"]
