"""Predictive routing replay (PR2): experts are chosen by where the router is going, then replayed as in R2.

With h the input of a router, p = h W its logits and W_p its predictor, which starts at 0:

    rollout, scoring   predicted = top_k(p_old + h_old W_p), recorded in the scoring pass
    training           predicted is replayed
    predictor          min over W_p of  sum_l E_t KL(softmax(p) || softmax(p_old + h_old W_p))

p is of the current router, without a gradient; the first minibatch of a rollout, where p = p_old, is left out. The
predictor learns beside the policy and neither changes the other's gradient: the policy feels it in the experts alone.

Source: arXiv 2606.00395, eq. 4 to 8 and algorithm 3, as the documentation of its first author's implementation states
them (pull request 1362 of radixark/miles); of the paper itself only the abstract was read. Choices of ours: the gates
are the softmax of p at the predicted experts, without the predictor, so that the ratio is 1 at the first update (that
implementation adds the predictor when it scores); E_t is over all tokens of prompts and answers, none left out; the
predictor's learning rate is a number of its own and constant (there the policy's times 50 to 10^4, by default 10^3,
of 2e-6 in its scripts), by Adam without weight decay or clipping; evaluation and export leave the predictor out.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.array_typing import Array, Float, SegmentIds
from jaxrl_llm.models.routing import Routing, predicted_change
from jaxrl_llm.training.gaps import flips
from jaxrl_llm.training.routing_records import by_router

__all__ = ["prediction_gaps", "prediction_kl"]


def prediction_kl(
    predictor: Float[Array, "l d e"], old: Routing, logits: Float[Array, "l b t e"]
) -> Float[Array, "l b t"]:
    """KL(softmax(p) || softmax(p_old + h_old W_p)) of every router, whose gradient reaches W_p alone.

    Args:
      old: p_old and h_old, the logits and inputs of the scoring pass.
      logits: p, of the training forward.
    """
    assert old.logits is not None
    assert old.inputs is not None
    change = jax.vmap(predicted_change)(old.inputs, predictor)
    return _kl(jax.lax.stop_gradient(logits), old.logits + change)


def prediction_gaps(old: Routing, logits: Float[Array, "l b t e"], segment_ids: SegmentIds) -> dict[str, M.Metric]:
    """How far the router went, that is what the predictor had to foresee: the same KL and the same share of experts
    that differ as with it, but with W_p = 0."""
    assert old.logits is not None
    went = _kl(logits, old.logits)
    current = Routing(old.experts, logits)
    where = segment_ids != 0
    return {
        "routing/unpredicted_kl": M.Mean(
            jnp.sum(went, where=where[None], dtype=jnp.float32), jnp.sum(where, dtype=jnp.float32)
        ),
        **flips("routing/flips_unpredicted", by_router(old), current, segment_ids),
    }


def _kl(logits: Float[Array, "*n e"], others: Float[Array, "*n e"]) -> Float[Array, "*n"]:
    own = jax.nn.log_softmax(logits, axis=-1)
    return jnp.sum(jnp.exp(own) * (own - jax.nn.log_softmax(others, axis=-1)), axis=-1)
