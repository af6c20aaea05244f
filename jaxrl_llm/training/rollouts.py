"""Batches of rollouts: a policy answers prompts, verifier and reward model judge the answers, policies score them."""

import dataclasses
import time
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from jaxrl_llm import tasks
from jaxrl_llm.ground import processes
from jaxrl_llm.ground.array_typing import PerAnswer, SegmentIds, Tokens
from jaxrl_llm.objectives.rewards import KlController
from jaxrl_llm.rollout.protocol import RolloutEngine
from jaxrl_llm.rollout.trajectory import Trajectory
from jaxrl_llm.training import collect
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.layout import Layout, UpdateConfig, epochs_of
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.reward_sources import RewardConfig, RolloutStream
from jaxrl_llm.training.sources import Drawn, Source, with_reference
from jaxrl_llm.training.state import TrainState


@runtime_checkable
class AnswerScorer(Protocol):
    """What gives answers a score: `RewardModel`."""

    def score(self, tokens: Tokens, segment_ids: SegmentIds, updates: UpdateConfig) -> PerAnswer: ...


@dataclasses.dataclass(frozen=True)
class Rollouts(Source):
    """A `Source` of verified rollouts."""

    engine: RolloutEngine
    scorer: Scorer
    task: tasks.Task
    data_dir: str | None
    seed: int
    prompts: int  # a step; the engine gives each `group_size` answers
    updates: UpdateConfig
    sampling: collect.DynamicSampling
    rewards: RewardConfig
    samples: int = 0  # answers a step that a person can read
    read_all: bool = False  # prompts may be longer than the run allows, which `read_data` finds out
    reward_model: AnswerScorer | None = None  # judges the answers beside the verifier
    reference: Policy | None = None

    def stream(self) -> RolloutStream:
        prompts = tasks.prompts(self.task, "train", seed=self.seed, batch_size=self.prompts, data_dir=self.data_dir)
        return RolloutStream(prompts, self._controller.initial)

    @property
    def _controller(self) -> KlController:
        objective: Any = self.scorer.learner.objective  # one that reads rollouts has an advantage
        return objective.advantage.kl_controller

    def read_data(self) -> str:
        if self.read_all:
            tasks.all_prompts(self.task, "train", data_dir=self.data_dir)
        return ""

    def started(self, start: TrainState | None, folder: Path | None) -> "Rollouts":
        return with_reference(self, self.scorer.learner.objective, start, folder)

    def next(self, stream: Any, step: int, state: TrainState) -> Drawn:
        """One rollout. The models score the answers while the verifier still looks at them."""
        start = time.monotonic()
        asked = self.sample(stream, step, state)
        sampled = time.monotonic()
        t, judged = asked.trajectory, None
        epochs = self.layouts(t, step)
        scores = self.scorer.score(state, self.reference, t, epochs[0])
        if self.reward_model is not None:
            judged = stream.centred(self.reward_model.score(t.tokens, t.segment_ids, self.updates))
        dispatched = time.monotonic()
        rollout = asked.finish(judged)
        host = rollout.metrics | {
            "rollout/tokens_per_s": rollout.tokens / (sampled - start),
            "time/rollout_s": sampled - start,
            "time/verifier_s": time.monotonic() - dispatched,
        }
        kl_coef = stream.kl_coef
        steered = kl_coef if self._controller.target else None
        experience = self.scorer.experience(rollout.trajectory, *scores, kl_coef=steered)
        if kl_coef:
            host["kl/reward_coef"] = kl_coef
        if self._controller.target:  # the next rollout's
            measured: Any = processes.fetch(experience.metrics["kl/ref_answer"])
            if measured.count > 0:  # where every answer is filtered out there is none, and nothing to steer by
                stream.kl_coef = self._controller.next(kl_coef, float(measured.total / measured.count))
        if stream.centre is not None:
            host["reward/reward_model_centre"] = stream.centre
        return Drawn(experience.batch, epochs, experience.metrics | rollout.sources, host, rollout.samples)

    def sample(self, stream: Any, step: int, state: TrainState) -> collect.Rollout:
        """The answers of the rollout of a step, on their way through the verifier."""
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        # The plain parameters are not kept: those of adapters are a copy.
        params = state.policy.plain(self.scorer.learner.model)
        how = self.sampling, self.rewards, self.samples, step - 1
        return collect.begin(self.engine, params, stream, self.task, key, *how)

    def layouts(self, trajectory: Trajectory, step: int) -> list[list[Layout]]:
        """The micro-batches of every minibatch, by epoch."""
        held, masks = processes.fetch((trajectory.segment_ids, trajectory.loss_mask))
        size, longest = self.engine.group_size, self.engine.max_new_tokens
        return epochs_of(held, masks, size, longest, self.updates, seed=self.seed, step=step)
