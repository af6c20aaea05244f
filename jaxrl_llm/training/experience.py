"""From a verified rollout to a `TrainBatch`: scores of the old policy, the reference and the critic, and advantages."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import metrics as M
from jaxrl_llm import scoring
from jaxrl_llm.array_typing import PerToken
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.objectives import Objective
from jaxrl_llm.rollout.trajectory import Trajectory
from jaxrl_llm.training.layout import Layout
from jaxrl_llm.training.routing_diagnostics import expert_load
from jaxrl_llm.training.routing_replay import ReplayConfig, check_recorded, flips, in_scoring, in_training
from jaxrl_llm.training.state import TrainBatch, TrainState
from jaxrl_llm.training.step import Learner, Scored

__all__ = ["Experience", "Scorer"]


@dataclasses.dataclass(frozen=True)
class Experience:
    """batch: what the updates learn from. metrics: of the gaps between sampler, old policy and reference."""

    batch: TrainBatch
    metrics: dict[str, M.Metric]


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Scores rollouts for a learner.

    first_forward: the single update of a rollout takes its own forward as pi_old (N = 1), so nothing is scored for it
      and the update itself compares with the sampler.
    """

    learner: Learner
    replay: ReplayConfig
    group_size: int
    first_forward: bool = False

    def __call__(
        self, state: TrainState, reference: Any, trajectory: Trajectory, layouts: Sequence[Layout]
    ) -> Experience:
        """Score every minibatch of a rollout at the shape it will be trained in.

        Args:
          reference: parameters of pi_ref, or None if the objective needs none.
          layouts: the micro-batches of all minibatches of one epoch.

        Raises:
          ValueError: replay asks for a routing that was not captured.
        """
        t, objective = trajectory, self.learner.objective
        lost = {}
        if self.replay.mode == "R3":
            lost = {"check/unrecorded": M.Maximum(check_recorded(t.routing, t.segment_ids, "rollout"))}
        old, ref, recorded = Scored(), None, None
        if not self.first_forward:
            keep_logits = self.replay.records_logits or "router_logprobs" in objective.needs
            room = self.learner.room(
                t.tokens,
                values="value_head" in state.params,
                routing="logits" if keep_logits else "experts",
                choices=self.replay.mode == "R3" and not keep_logits,  # what is replayed would hide them
            )
            old = self._score(state.params, t, layouts, room, in_scoring(self.replay, t.routing))
            recorded = old.routing
            if self.replay.mode == "R2":
                lost = {"check/unrecorded": M.Maximum(check_recorded(recorded, t.segment_ids, "scoring pass"))}
        if self.learner.critic_optimizer is not None:
            critic = self._score(state.critic, t, layouts, self.learner.room(t.tokens, logprobs=False, values=True))
            old = old.replace(state_values=critic.state_values)
        if "ref_logprobs" in objective.needs:
            ref = self._score(reference, t, layouts, self.learner.room(t.tokens, routing="experts")).logprobs
        advantages, old_values, returns = _advantages(objective, self.group_size, t, old, ref)
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
            routing=in_training(self.replay, t.routing, recorded),
            recorded=recorded,
            sampled=t.routing if self.first_forward else None,
        )
        if self.first_forward:
            return Experience(batch, {})
        return Experience(batch, lost | _gaps(self.learner.model.config.num_experts, t, batch, old.chosen))

    def _score(
        self, params: Any, t: Trajectory, layouts: Sequence[Layout], into: Scored, replayed: Routing | None = None
    ) -> Scored:
        for layout in layouts:
            into = self.learner.score(params, t.tokens, replayed, layout, into=into)
        return into


@functools.partial(jax.jit, static_argnums=(0, 1))
def _advantages(
    objective: Objective, group_size: int, t: Trajectory, old: Scored, ref: PerToken | None
) -> tuple[PerToken, PerToken | None, PerToken | None]:
    """(advantages, old values, returns), all [b t]; the latter two None without a critic.

    A terminated answer has value 0 after its last token, a truncated one the critic's value of its last state.
    """
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
    )
    return advantages, values, returns


@functools.partial(jax.jit, static_argnums=0)
def _gaps(num_experts: int, t: Trajectory, batch: TrainBatch, chosen: Routing | None = None) -> dict[str, M.Metric]:
    """Sampler against old policy: |delta log p| for the run-time check, the experts that differ, and their load.

    chosen: what the old policy's router would have used where scoring replayed the rollout.
    """
    assert batch.old_logprobs is not None
    size = jnp.abs(batch.old_logprobs - t.sampler_logprobs)
    found: dict[str, M.Metric] = {
        "check/old_sampler_mean": M.Mean.of(size, t.loss_mask),
        "check/old_sampler_share": M.Mean.of((size > 1e-2) * 1.0, t.loss_mask),
    }
    if t.routing is not None and batch.recorded is not None:
        found |= flips(
            "routing/flips_sampler_old", t.routing, batch.recorded if chosen is None else chosen, t.segment_ids
        )
        found |= expert_load(batch.recorded, num_experts)
    return found
