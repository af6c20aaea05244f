"""Batches of rollouts: a policy answers prompts, verifier and reward model judge the answers, policies score them."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.ground import processes
from jaxrl_llm.ground.array_typing import Key, PerAnswer
from jaxrl_llm.ground.phases import phase
from jaxrl_llm.objectives.rewards import KlController
from jaxrl_llm.rollout.rollout import Rollout, RolloutEngine
from jaxrl_llm.training import collect
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.layout import Layout, UpdateConfig, epochs_of
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.reward_sources import RewardConfig, RolloutStream
from jaxrl_llm.training.sources import Source, with_reference
from jaxrl_llm.training.state import TrainState


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
    reward_model: Callable[[Rollout, UpdateConfig], PerAnswer] | None = None  # judges beside the verifier
    teacher: Callable[[Rollout, Sequence[Layout], collect.Draw, Policy], Rollout] | None = None  # gives its log-probs
    reference: Policy | None = None
    reference_dtype: str = "float32"
    kind_of_stream: ClassVar[type[RolloutStream]] = RolloutStream

    def stream(self) -> RolloutStream:
        prompts = tasks.prompts(self.task, "train", seed=self.seed, batch_size=self.prompts, data_dir=self.data_dir)
        return self.kind_of_stream(prompts, self._controller.initial)

    @property
    def longest(self) -> int:
        """The most tokens that are sampled for a prompt, over all turns."""
        return self.engine.max_new_tokens * self.task.turns

    @property
    def behind(self) -> int:
        """The most tokens behind a prompt."""
        return self.longest + self.task.observation_length * (self.task.turns - 1)

    def traces(self, params: Any, width: int) -> list[jax.stages.Traced]:
        """The programs of a rollout, of which the last returns it.

        Args:
          params: abstract, of training. width: of the prompts.
        """
        engine: Any = self.engine
        return [engine.trace(params, self.prompts, width)]

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

    def next(self, stream: Any, step: int, state: TrainState) -> collect.Draw:
        """One rollout. The models score the answers while the verifier still looks at them."""
        start = time.monotonic()
        with phase("rollout", self.prompts * self.engine.group_size):
            draw, seconds, waited = self.asked(stream, step, state)
        sampled = time.monotonic()
        rollout, scores = self.rewards.filtered(draw.rollout), None
        epochs = self.layouts(rollout, step)
        rollout = self.scorer.score(state, self.reference, rollout, epochs[0])
        if self.teacher is not None:
            rollout = self.teacher(rollout, epochs[0], draw, state.policy)
        if self.reward_model is not None:
            scores = stream.centred(self.reward_model(rollout, self.updates))
        dispatched = time.monotonic()
        draw = dataclasses.replace(draw, rollout=rollout, epochs=epochs)
        with phase("verifier"):
            draw = self.judged(draw, scores)
        host = draw.host | waited
        if seconds:
            host["rollout/tokens_per_s"] = draw.tokens / seconds
        host |= {"time/rollout_s": sampled - start, "time/verifier_s": time.monotonic() - dispatched}
        kl_coef = stream.kl_coef
        steered = kl_coef if self._controller.target else None
        rollout, metrics = self.scorer.experience(draw.rollout, kl_coef=steered, trained=step - 1)
        if kl_coef:
            host["kl/reward_coef"] = kl_coef
        if self._controller.target:  # the next rollout's
            measured: Any = processes.fetch(metrics["kl/ref_answer"])
            if measured.count > 0:  # where every answer is filtered out there is none, and nothing to steer by
                stream.kl_coef = self._controller.next(kl_coef, float(measured.total / measured.count))
        if stream.centre is not None:
            host["reward/reward_model_centre"] = stream.centre
        return dataclasses.replace(draw, rollout=rollout, metrics=metrics | draw.metrics, host=host)

    def judged(self, draw: collect.Draw, scores: PerAnswer | None = None) -> collect.Draw:
        """The draw once the verifier has seen it; scores: of the reward model."""
        return collect.judged(draw, self.rewards, self.longest, self.samples, scores)

    def asked(self, stream: Any, step: int, state: TrainState) -> tuple[collect.Draw, float, dict[str, float]]:
        """The rollout of a step, the seconds of its sampling (0: before a resume), and who waited how long."""
        start = time.monotonic()
        return self.sample(stream, step, state), time.monotonic() - start, {}

    def without_lag(self) -> "Rollouts":
        """The source whose rollouts are of the step that trains on them."""
        return self

    def in_flight(self, stream: Any) -> list[Any]:
        """The answers to prompts after the place of the stream."""
        return []

    def resume(self, stream: Any, place: Any, in_flight: Sequence[Any] = ()) -> None:
        """Go on from the place."""
        stream.set_state(place)

    def sample(self, stream: Any, step: int, state: TrainState) -> collect.Draw:
        """The answers of the rollout of a step, on their way through the verifier.

        Parameters that the rollout has on another mesh are moved once, whatever the number of draws; no copy is kept.
        """
        engine, params = self.engine, state.policy.plain(self.scorer.learner.model)
        weights, moved = engine.take_weights(params, step - 1)

        def draw() -> collect.Draw:
            return self._answered(weights, next(stream), step, moved)

        most = self.sampling.max_draws
        drawn = draw() if most == 1 else collect.mixed(draw, most, self.rewards, self.longest)
        engine.release(weights, params)
        return drawn

    def _answered(self, weights: Any, batch: tasks.Prompts, step: int, moved: dict[str, float]) -> collect.Draw:
        answers = self.engine.generate(weights, *questions(batch), self._key(step))
        return self._verifying(answers, batch, moved)

    def _verifying(self, answers: Rollout, batch: tasks.Prompts, moved: dict[str, float]) -> collect.Draw:
        return collect.verifying(answers, batch, self.task, self.engine.group_size, moved)

    def _key(self, step: int) -> Key:
        return jax.random.fold_in(jax.random.key(self.seed), step)

    def layouts(self, rollout: Rollout, step: int) -> list[list[Layout]]:
        """The micro-batches of every minibatch, by epoch."""
        held, masks = processes.fetch((rollout.segment_ids, rollout.loss_mask))
        size = self.engine.group_size
        return epochs_of(held, masks, size, self.behind, self.updates, seed=self.seed, step=step)


def questions(batch: tasks.Prompts) -> tuple[Any, Any, Any]:
    """Tokens and lengths of the prompts, and what their answers' randomness comes from."""
    return batch["tokens"], batch["lengths"], batch["draw"].astype(np.uint32)
