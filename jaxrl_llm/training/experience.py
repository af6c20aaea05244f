"""The fields of a rollout that updates read: scores of the old policy, the reference and the critic, and advantages."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.array_typing import Array, Float, PerToken
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models import Routing, scoring
from jaxrl_llm.objectives import Objective
from jaxrl_llm.objectives.advantages import KlRewards
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.training.expert_load import load, tokens_sent
from jaxrl_llm.training.gaps import (
    ages,
    decompose,
    flipped_before,
    flips,
    ratio_by_flip,
    sampler_against_old,
)
from jaxrl_llm.training.layout import Layout
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.replay import ReplayConfig, count_unrecorded, in_scoring, prescribe
from jaxrl_llm.training.state import TrainState
from jaxrl_llm.training.step import Learner

_OVER_TURNS = ByName({"timed_rewards": "jaxrl_llm.objectives.reward_shaping"})


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

    def score(
        self, state: TrainState, reference: Policy | None, rollout: Rollout, layouts: Sequence[Layout]
    ) -> Rollout:
        """The rollout with the scores of pi_old and the critic, and the log-probs of pi_ref; rewards are not read.

        Args:
          layouts: the minibatches of one epoch, each scored at the shape it will be trained in.

        Raises:
          ValueError: replay asks for a routing that was not recorded.
        """
        score, routes = self.learner.score, rollout.routes
        if not self.first_forward:
            replayed = in_scoring(self.replay, routes.sampled)
            found = score(state.policy, rollout, layouts, self._wanted(state.policy), replayed)
            rollout = rollout.replace(
                old_logprobs=found["logprobs"],
                state_values=found.get("state_values"),
                routes=routes.replace(scored=found.get("routing")),
            )
            objective: Any = self.learner.objective  # one that reads rollouts has an advantage
            if objective.advantage.reads_squares:
                half = dataclasses.replace(self.learner, temperature=self.learner.temperature / 2)
                found = half.score(state.policy, rollout, layouts, {"logprobs"}, replayed)
                rollout = rollout.replace(half_logprobs=found["logprobs"])
        if state.critic is not None:
            found = score(state.critic, rollout, layouts, {"state_values"})
            rollout = rollout.replace(state_values=found["state_values"])
        if "ref_logprobs" in self.learner.objective.needs:
            assert reference is not None
            # The record is not read: one program with the old policy.
            found = score(reference, rollout, layouts, {"logprobs", "routing"})
            rollout = rollout.replace(ref_logprobs=found["logprobs"])
        return rollout

    def experience(
        self, rollout: Rollout, kl_coef: float | None = None, trained: int = 0
    ) -> tuple[Rollout, dict[str, M.Metric]]:
        """Give a scored rollout its advantages.

        Args:
          rollout: with rewards [b].
          kl_coef: of the KL inside the reward, where that moves; None: the objective's own.
          trained: steps that pi_old has been trained for, from which the age of tokens counts.

        Returns:
          The rollout as the updates train on it, with advantages [b t] and, with a critic, old values and returns
          [b t]; and metrics of the gaps between sampler, old policy and reference.

        Raises:
          ValueError: replay asks for a routing that was not recorded.
        """
        steered = None if kl_coef is None else jnp.float32(kl_coef)
        advantages, old_values, returns = _advantages(self.learner.objective, self.group_size, rollout, steered)
        rollout = rollout.replace(
            advantages=advantages,
            old_values=old_values,
            returns=returns,
            routes=prescribe(self.replay, rollout.routes),
        )
        metrics = {}
        if rollout.versions is not None:
            age, metrics = ages(rollout.versions, jnp.int32(trained), rollout.loss_mask)
            rollout = rollout.replace(age=age)
        if not self.first_forward:
            metrics |= _gaps(self.learner.model.config.num_experts, rollout)
        return rollout, metrics

    def traces(
        self, state: TrainState, reference: Policy | None, rollout: Rollout, layout: Layout
    ) -> list[tuple[Policy, jax.stages.Traced]]:
        """The programs of `score` for one minibatch, each with the policy that it reads, from abstract arrays.

        One serves the reference too where it is the program of the old policy.
        """
        replayed, wanted = in_scoring(self.replay, rollout.routes.sampled), self._wanted(state.policy)
        shared = not self.first_forward and replayed is None and wanted == {"logprobs", "routing"}
        passes: list[Any] = [] if self.first_forward else [(state.policy, wanted, replayed)]
        if state.critic is not None:
            passes.append((state.critic, {"state_values"}, None))
        if reference is not None and not shared:
            passes.append((reference, {"logprobs", "routing"}, None))
        return [(one, self.learner.trace_score(one, rollout, layout, *how)) for one, *how in passes]

    def _wanted(self, policy: Policy) -> set[str]:
        """Scores of the old policy; a choice of its router that a replay overrules is recorded beside it."""
        replayed = self.replay.mode != "off" and self.replay.what == "logits"
        logits = replayed or "router_logprobs" in self.learner.objective.needs
        wanted = {"logprobs", "routing"} | ({"router_logits"} if logits else set())
        if policy.value_head is not None:
            wanted.add("state_values")
        if self.replay.mode == "R3":
            wanted.add("chosen")
        return wanted


@functools.partial(jax.jit, static_argnums=(0, 1))
def _advantages(
    objective: Objective, group_size: int, rollout: Rollout, kl_coef: Float[Array, ""] | None = None
) -> tuple[PerToken, PerToken | None, PerToken | None]:
    """(advantages, old values, returns); the latter two None without a critic.

    A terminated answer has value 0 after its last token, a truncated one the critic's value of its last state.
    """
    mask, segment_ids = rollout.loss_mask, rollout.segment_ids
    rewards: Any = rollout.rewards
    truncated: Any = rollout.truncated
    state_values: Any = rollout.state_values
    chex.assert_shape([rewards, truncated], (len(mask),))  # [b 1] would broadcast
    tokens: dict[str, Any] = {"mask": mask, "old_logprobs": rollout.old_logprobs, "ref_logprobs": rollout.ref_logprobs}
    tokens["kl_coef"] = kl_coef
    if rollout.earlier_rewards is not None and isinstance(objective.advantage, KlRewards):
        rewards = _OVER_TURNS["timed_rewards"](rewards, rollout.earlier_rewards, mask)
    if not objective.advantage.needs_values:
        learns = jnp.any(mask.reshape(-1, group_size * mask.shape[1]), axis=1)  # fillers do not
        given = {"teacher_logprobs": rollout.teacher_logprobs, "half_logprobs": rollout.half_logprobs}
        tokens |= {name: x for name, x in given.items() if x is not None}
        more = tokens if objective.advantage.reads_tokens else {}
        advantages = objective.advantage(rewards, group_size=group_size, where=learns, **more)
        return jnp.where(mask, advantages[:, None] if advantages.ndim == 1 else advantages, 0), None, None
    values = scoring.align(state_values, segment_ids)
    last = jnp.maximum(jnp.sum(segment_ids != 0, axis=1) - 1, 0)
    final = jnp.take_along_axis(state_values, last[:, None], axis=1)[:, 0]
    bootstrap = jnp.where(truncated, final, 0)
    advantages, returns = objective.advantage(rewards, values=values, bootstrap=bootstrap, **tokens)
    return advantages, values, returns


@functools.partial(jax.jit, static_argnums=0)
def _gaps(num_experts: int, rollout: Rollout) -> dict[str, M.Metric]:
    """Sampler against old policy for the run-time checks, what a replay lacks, and the load of the experts."""
    assert rollout.old_logprobs is not None
    routes = rollout.routes
    metrics = sampler_against_old(rollout, rollout.old_logprobs, routes.scored)
    if rollout.ref_logprobs is not None:
        of_answer = jnp.sum(rollout.old_logprobs - rollout.ref_logprobs, axis=1, where=rollout.loss_mask)
        metrics["kl/ref_answer"] = M.Mean.of(of_answer, jnp.any(rollout.loss_mask, axis=1))
    if routes.replayed is not None:
        metrics["check/unrecorded"] = M.Maximum(count_unrecorded(routes.replayed, rollout.segment_ids))
    if routes.sampled is not None and routes.scored is not None:
        metrics |= load(tokens_sent(routes.scored.experts, num_experts))
    return metrics


def diagnose(
    learner: Learner, policy: Policy, old: Policy, rollout: Rollout, layouts: Sequence[Layout]
) -> dict[str, M.Metric]:
    """The decomposition of the ratio over a whole rollout, by three forwards (see gaps.py).

    These are the current policy with its own experts e, the current policy with e_old, and the old policy with e.

    Args:
      policy: after the updates. old: before them.
      rollout: with `old_logprobs` and the routing of the scoring pass.
      layouts: the minibatches of one epoch, in whose shapes the forwards run.
    """
    scored = rollout.routes.scored
    assert scored is not None, "a dense model has no routing to diagnose"

    def score(policy: Policy, replayed: Routing | None) -> tuple[PerToken, Routing]:
        found = learner.score(policy, rollout, layouts, {"logprobs", "routing"}, replayed)
        return found["logprobs"], found["routing"]

    current, experts = score(policy, None)
    held, _ = score(policy, Routing(scored.experts))
    swapped, _ = score(old, experts)
    return _describe(rollout, current, experts, held, swapped)


@jax.jit
def _describe(
    rollout: Rollout, current: PerToken, experts: Routing, held: PerToken, swapped: PerToken
) -> dict[str, M.Metric]:
    old, mask = rollout.routes.scored, rollout.loss_mask
    assert old is not None
    assert rollout.old_logprobs is not None
    return (
        decompose(current, held, swapped, rollout.old_logprobs, mask)
        | flips("routing/flips_fresh", old, experts, rollout.segment_ids)
        | ratio_by_flip(current - rollout.old_logprobs, flipped_before(old, experts), mask)
    )
