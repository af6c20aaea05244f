"""The result of a rollout: answers with the sampler's log-probs, masks and routing, aligned with their tokens."""

import flax.struct

from jaxrl_llm.ground.array_typing import Array, Bool, Integer, Mask, PerAnswer, PerToken, SegmentIds, Tokens
from jaxrl_llm.models import Routing


class Trajectory(flax.struct.PyTreeNode):
    """Answers of a rollout in (prompt, sample) order: b = prompts x G, groups are contiguous rows."""

    tokens: Tokens  # prompt and answer contiguous, left-aligned, padding right
    segment_ids: SegmentIds  # 1 on prompt and answer, 0 on padding: the only validity
    loss_mask: Mask  # the answer, EOS included
    sampler_logprobs: PerToken  # of tokens[:, t] under the distribution it was drawn from; 0 outside the answer
    truncated: Bool[Array, "b"]  # the answer hit its length bound without EOS
    # Recorded when tokens[:, t] was fed ("no record" on padding and on the last token); None for a dense model or when
    # it was not recorded.
    routing: Routing | None = None
    rewards: PerAnswer | None = None  # None until a verifier has seen the answers
    # The number of the policy (steps trained) that sampled tokens[:, t]; None: the policy of this step.
    versions: Integer[Array, "b t"] | None = None
