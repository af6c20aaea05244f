"""One batch from prompt to loss: a tree that fills up, and the protocol of the engines that sample it."""

from typing import Any, ClassVar, Protocol, runtime_checkable

import flax.struct

from jaxrl_llm.ground.array_typing import (
    Array,
    Bool,
    Integer,
    Key,
    Mask,
    Params,
    PerAnswer,
    PerToken,
    SegmentIds,
    Tokens,
)
from jaxrl_llm.models import Routing


class Routes(flax.struct.PyTreeNode):
    """The routing of a rollout, recorded when tokens[:, t] was fed: "no record" on padding and on the last token.

    None where a model is dense or where nothing was recorded.
    """

    sampled: Routing | None = None  # recorded by the rollout engine
    scored: Routing | None = None  # recorded by the old policy's scoring pass, with logits where something needs them
    replayed: Routing | None = None  # by the training forward; `prescribe` decides


class Rollout(flax.struct.PyTreeNode):
    """Answers in (prompt, sample) order: b = prompts x G, groups are contiguous rows. None is what is not there yet.

    Preference pairs and given answers are such rows without a sampler. Of pairs, rows 2 i and 2 i + 1 are the chosen
    and the rejected answer of pair i, with advantages 1 and -1; given answers have advantage 1. All log-probs are of
    tokens[:, t], over the tokens of `kept` where there are such, and 0 outside the answer.
    """

    tokens: Tokens  # prompt and answer contiguous, left-aligned, padding right
    segment_ids: SegmentIds  # 1 on prompt and answer, 0 on padding: the only validity
    loss_mask: Mask  # the tokens to learn from: the answer, EOS included

    # Filled by the engine.
    sampler_logprobs: PerToken | None = None  # under the distribution that the token was drawn from
    truncated: Bool[Array, "b"] | None = None  # the answer hit its length bound without EOS
    # The ids of the tokens that could have been drawn in place of tokens[:, t], most probable first and -1 behind the
    # last; -1 throughout, and None: the whole vocabulary.
    kept: Integer[Array, "b t m"] | None = None
    # The number of the policy (steps trained) that sampled tokens[:, t]; None: the policy of this step.
    versions: Integer[Array, "b t"] | None = None
    routes: Routes = Routes()

    # Filled by the verifier, and by passes of the policies.
    rewards: PerAnswer | None = None
    earlier_rewards: PerToken | None = None  # the part of `rewards` earned before the last turn, at the ends of turns
    # None where the first forward itself gives them (one update a rollout), or where no objective reads them.
    old_logprobs: PerToken | None = None
    ref_logprobs: PerToken | None = None
    teacher_logprobs: PerToken | None = None
    half_logprobs: PerToken | None = None  # of pi_old at half the temperature
    state_values: PerToken | None = None  # of the state AFTER token t, since GAE needs the last one

    # Filled from these: what the objective reads.
    advantages: PerToken | None = None
    old_values: PerToken | None = None
    returns: PerToken | None = None
    margins: PerToken | None = None
    age: PerToken | None = None  # steps trained since the policy that sampled the token; None: 0 everywhere

    @property
    def by_token(self) -> "Rollout":
        """The fields that an update reads, which cuts micro-batches out of arrays by token."""
        read_before = {"rewards": None, "earlier_rewards": None, "state_values": None, "half_logprobs": None}
        return self.replace(truncated=None, versions=None, **read_before)


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples groups of answers: `Engine` on the trainer's devices, `RemoteEngine` on servers."""

    @property
    def group_size(self) -> int: ...

    @property
    def max_new_tokens(self) -> int: ...

    remote: ClassVar[bool]  # whether it answers while the devices train

    def take_weights(self, params: Params, version: int = 0) -> tuple[Any, dict[str, float]]:
        """The weights that `generate` samples with, and the metrics of bringing them where they are needed.

        version: of the parameters, the steps that trained them.
        """
        ...

    def generate(self, weights: Any, prompts: Any, lengths: Any, uids: Any, key: Key, /, limits: Any = None) -> Rollout:
        """Sample `group_size` answers to every prompt; arguments and errors as of `Engine.generate`."""
        ...

    def release(self, weights: Any, params: Params, /) -> None:
        """Free what `take_weights` made of these parameters."""
        ...
