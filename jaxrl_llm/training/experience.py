"""From a verified rollout to a `TrainBatch`: scores of the old policy, the reference and the critic, and advantages."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float, PerToken
from jaxrl_llm.models import Routing, scoring
from jaxrl_llm.objectives import Objective
from jaxrl_llm.rollout.trajectory import Trajectory
from jaxrl_llm.training.gaps import (
    ages,
    decompose,
    expert_load,
    flipped_before,
    flips,
    ratio_by_flip,
    sampler_against_old,
)
from jaxrl_llm.training.layout import Layout
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.replay import ReplayConfig, count_unrecorded, in_scoring, prescribe
from jaxrl_llm.training.state import TrainBatch, TrainState
from jaxrl_llm.training.step import Learner, Scored


class Experience(NamedTuple):
    """What the updates train on, and the gaps between sampler, old policy and reference."""

    batch: TrainBatch
    metrics: dict[str, M.Metric]


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Scores rollouts for a learner.

    first_forward: with one update per rollout (N = 1) its own forward is pi_old, so there is no scoring pass and the
      update itself compares with the sampler.
    """

    learner: Learner
    replay: ReplayConfig
    group_size: int
    first_forward: bool = False

    def __call__(
        self, state: TrainState, reference: Policy | None, trajectory: Trajectory, layouts: Sequence[Layout]
    ) -> Experience:
        """`score` and `experience` at once, of a rollout with rewards."""
        return self.experience(trajectory, *self.score(state, reference, trajectory, layouts))

    def score(
        self, state: TrainState, reference: Policy | None, trajectory: Trajectory, layouts: Sequence[Layout]
    ) -> tuple[Scored, PerToken | None]:
        """The scores of pi_old and the critic, and the log-probs of pi_ref; rewards are not read.

        Args:
          layouts: the minibatches of one epoch, each scored at the shape it will be trained in.

        Raises:
          ValueError: replay asks for a routing that was not recorded.
        """
        t, old, ref = trajectory, Scored(), None
        if not self.first_forward:
            into, replayed = self._old_scores(t, state.policy), in_scoring(self.replay, t.routing)
            old = self.learner.score(state.policy, t.tokens, layouts, into, replayed, t.read)
        if state.critic is not None:
            into = self.learner.blank_scores(t.tokens, logprobs=False, values=True)
            valued = self.learner.score(state.critic, t.tokens, layouts, into)
            old = old.replace(state_values=valued.state_values)
        if "ref_logprobs" in self.learner.objective.needs:
            into = self.learner.blank_scores(t.tokens, record="experts")  # not read: one program with the old policy
            assert reference is not None
            ref = self.learner.score(reference, t.tokens, layouts, into, read=t.read).logprobs
        return old, ref

    def experience(
        self,
        t: Trajectory,
        old: Scored,
        ref: PerToken | None = None,
        kl_coef: float | None = None,
        trained: int = 0,
    ) -> Experience:
        """What the updates train on: the rollout, its scores, and advantages from its rewards.

        kl_coef: of the KL inside the reward, where that moves; otherwise the objective's own.
        trained: steps that pi_old has been trained for, from which the age of tokens counts.
        """
        steered = None if kl_coef is None else jnp.float32(kl_coef)
        advantages, old_values, returns = _advantages(self.learner.objective, self.group_size, t, old, ref, steered)
        batch = TrainBatch(
            tokens=t.tokens,
            segment_ids=t.segment_ids,
            loss_mask=t.loss_mask,
            advantages=advantages,
            sampler_logprobs=t.sampler_logprobs,
            old_logprobs=old.logprobs,
            ref_logprobs=ref,
            old_values=old_values,
            returns=returns,
            kept=t.kept,
            routing=prescribe(self.replay, t.routing, old.recorded),
        )
        metrics = {}
        if t.versions is not None:
            age, metrics = ages(t.versions, jnp.int32(trained), t.loss_mask)
            batch = batch.replace(age=age)
        if not self.first_forward:
            metrics |= _gaps(self.learner.model.config.num_experts, batch, old.by_router)
        return Experience(batch, metrics)

    def lower(self, state: TrainState, t: Trajectory, layout: Layout) -> jax.stages.Lowered:
        """The program that scores a minibatch for the old policy, from abstract arrays."""
        into = jax.eval_shape(lambda t: self._old_scores(t, state.policy), t)
        mesh: Any = self.learner.model.mesh
        into = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.rollout_sharding(x, mesh)), into
        )
        replayed = in_scoring(self.replay, t.routing)
        return self.learner.lower_score(state.policy, t.tokens, layout, into, replayed, t.read)

    def _old_scores(self, t: Trajectory, policy: Policy) -> Scored:
        """Arrays for the pass of the old policy; with replay, only the logits show the experts chosen by its router."""
        replayed = self.replay.mode != "off" and self.replay.what == "logits"
        logits = replayed or "router_logprobs" in self.learner.objective.needs
        return self.learner.blank_scores(
            t.tokens,
            values=policy.value_head is not None,
            record="logits" if logits else "experts",
            by_router=self.replay.mode == "R3" and not logits,
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _advantages(
    objective: Objective,
    group_size: int,
    t: Trajectory,
    old: Scored,
    ref: PerToken | None,
    kl_coef: Float[Array, ""] | None = None,
) -> tuple[PerToken, PerToken | None, PerToken | None]:
    """(advantages, old values, returns); the latter two None without a critic.

    A terminated answer has value 0 after its last token, a truncated one the critic's value of its last state.
    """
    chex.assert_shape([t.rewards, t.truncated], (len(t.tokens),))  # [b 1] would broadcast
    rewards: Any = t.rewards
    state_values: Any = old.state_values
    if not objective.advantage.needs_values:
        learns = jnp.any(t.loss_mask.reshape(-1, group_size * t.loss_mask.shape[1]), axis=1)  # fillers do not
        advantages = objective.advantage(rewards, group_size=group_size, where=learns)
        return jnp.where(t.loss_mask, advantages[:, None], 0), None, None
    values = scoring.align(state_values, t.segment_ids)
    last = jnp.maximum(jnp.sum(t.segment_ids != 0, axis=1) - 1, 0)
    final = jnp.take_along_axis(state_values, last[:, None], axis=1)[:, 0]
    advantages, returns = objective.advantage(
        rewards,
        values=values,
        mask=t.loss_mask,
        bootstrap=jnp.where(t.truncated, final, 0),
        old_logprobs=old.logprobs,
        ref_logprobs=ref,
        kl_coef=kl_coef,
    )
    return advantages, values, returns


@functools.partial(jax.jit, static_argnums=0)
def _gaps(num_experts: int, batch: TrainBatch, by_router: Routing | None = None) -> dict[str, M.Metric]:
    """Sampler against old policy for the run-time checks, what a replay lacks, and the load of the experts.

    by_router: the experts chosen by the old policy's router, if the record holds other ones, replayed in scoring.
    """
    assert batch.old_logprobs is not None
    records = batch.routing
    own_choice = records.scored if by_router is None else by_router
    metrics = sampler_against_old(batch, batch.old_logprobs, own_choice)
    if batch.ref_logprobs is not None:
        of_answer = jnp.sum(batch.old_logprobs - batch.ref_logprobs, axis=1, where=batch.loss_mask)
        metrics["kl/ref_answer"] = M.Mean.of(of_answer, jnp.any(batch.loss_mask, axis=1))
    if records.replayed is not None:
        metrics["check/unrecorded"] = M.Maximum(count_unrecorded(records.replayed, batch.segment_ids))
    if records.sampled is not None and records.scored is not None:
        metrics |= expert_load(records.scored, num_experts)
    return metrics


def diagnose(
    learner: Learner, policy: Policy, old: Policy, batch: TrainBatch, layouts: Sequence[Layout]
) -> dict[str, M.Metric]:
    """The decomposition over a whole rollout, by three forwards: the current policy with its own experts e, the current
    policy with e_old, and the old policy with e. They have the shapes of training, those of one epoch's `layouts`."""
    scored = batch.routing.scored
    assert scored is not None, "a dense model has no routing to diagnose"

    def score(policy: Policy, replayed: Routing | None) -> Scored:
        into = learner.blank_scores(batch.tokens, record="experts")
        return learner.score(policy, batch.tokens, layouts, into, replayed, batch.read)

    current = score(policy, None)
    held = score(policy, Routing(scored.experts))
    swapped = score(old, current.recorded)
    return _describe(batch, current, held.logprobs, swapped.logprobs)


@jax.jit
def _describe(batch: TrainBatch, current: Scored, held: PerToken, swapped: PerToken) -> dict[str, M.Metric]:
    old, mask = batch.routing.scored, batch.loss_mask
    assert old is not None
    assert batch.old_logprobs is not None
    assert current.recorded is not None
    assert current.logprobs is not None
    return (
        decompose(current.logprobs, held, swapped, batch.old_logprobs, mask)
        | flips("routing/flips_fresh", old, current.recorded, batch.segment_ids)
        | ratio_by_flip(current.logprobs - batch.old_logprobs, flipped_before(old, current.recorded), mask)
    )
