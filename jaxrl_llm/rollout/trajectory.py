"""The result of a rollout: answers with the sampler's log-probs, masks and routing, aligned with their tokens."""

import flax.struct

from jaxrl_llm.ground.array_typing import Array, Bool, Mask, PerAnswer, PerToken, SegmentIds, Tokens
from jaxrl_llm.models import Routing

__all__ = ["Trajectory"]


class Trajectory(flax.struct.PyTreeNode):
    """Answers of a rollout in (prompt, sample) order: b = prompts x G, groups are contiguous rows.

    tokens           [b t]  prompt and answer contiguous, left-aligned, padding right
    segment_ids      [b t]  1 on prompt and answer, 0 on padding: the only validity
    loss_mask        [b t]  the answer, EOS included
    sampler_logprobs [b t]  log-prob of tokens[:, t] under the distribution it was drawn from; 0 outside the answer
    truncated        [b]    the answer hit its length bound without EOS
    routing                 recorded when tokens[:, t] was fed ("no record" on padding and on the last token);
                            None for a dense model or when it was not recorded
    rewards          [b]    None until a verifier has seen the answers
    """

    tokens: Tokens
    segment_ids: SegmentIds
    loss_mask: Mask
    sampler_logprobs: PerToken
    truncated: Bool[Array, "b"]
    routing: Routing | None = None
    rewards: PerAnswer | None = None
