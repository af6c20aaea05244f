"""Batches of rollouts: a policy answers prompts, verifier and reward model judge the answers, policies score them.

With a lag k a step trains on the rollout that was asked for k steps before, of the policy of then; the first one asks
for k + 1, so that the age of what is trained on goes 0, 1, ..., k and stays there. Prompts and keys are those of the
rollout's own step, whatever the lag. The jax engine samples in turn with training, on the same devices, and what a lag
gains is that the verifier has k steps; a remote engine answers in a thread meanwhile.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.ground import processes, sharding
from jaxrl_llm.ground.array_typing import Key, PerAnswer, SegmentIds, Tokens
from jaxrl_llm.objectives.rewards import KlController
from jaxrl_llm.rollout.remote import RolloutEngine
from jaxrl_llm.rollout.trajectory import Trajectory
from jaxrl_llm.training import collect
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.in_flight import Arrays, StreamAhead, as_arrays, as_trajectory
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
    lag: int = 0  # steps between asking for a rollout and training on it

    def stream(self) -> RolloutStream:
        prompts = tasks.prompts(self.task, "train", seed=self.seed, batch_size=self.prompts, data_dir=self.data_dir)
        return (StreamAhead if self.lag else RolloutStream)(prompts, self._controller.initial)

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
        asked, seconds, waited = self.asked(stream, step, state)
        sampled = time.monotonic()
        t, judged = asked.trajectory, None
        epochs = self.layouts(t, step)
        scores = self.scorer.score(state, self.reference, t, epochs[0])
        if self.reward_model is not None:
            judged = stream.centred(self.reward_model.score(t.tokens, t.segment_ids, self.updates))
        dispatched = time.monotonic()
        rollout = asked.finish(judged)
        host = rollout.metrics | waited
        if seconds:
            host["rollout/tokens_per_s"] = rollout.tokens / seconds
        host |= {"time/rollout_s": sampled - start, "time/verifier_s": time.monotonic() - dispatched}
        kl_coef = stream.kl_coef
        steered = kl_coef if self._controller.target else None
        experience = self.scorer.experience(rollout.trajectory, *scores, kl_coef=steered, trained=step - 1)
        if kl_coef:
            host["kl/reward_coef"] = kl_coef
        if self._controller.target:  # the next rollout's
            measured: Any = processes.fetch(experience.metrics["kl/ref_answer"])
            if measured.count > 0:  # where every answer is filtered out there is none, and nothing to steer by
                stream.kl_coef = self._controller.next(kl_coef, float(measured.total / measured.count))
        if stream.centre is not None:
            host["reward/reward_model_centre"] = stream.centre
        return Drawn(experience.batch, epochs, experience.metrics | rollout.sources, host, rollout.samples)

    def asked(self, stream: Any, step: int, state: TrainState) -> tuple[collect.Rollout, float, dict[str, float]]:
        """The rollout of a step, the seconds of its sampling (0: before a resume), and who waited how long.

        With a lag first all those up to `step + lag` are asked of this policy that are not on their way.
        """
        if not self.lag:
            start = time.monotonic()
            return self.sample(stream, step, state), time.monotonic() - start, {}
        ahead = range(step + len(stream.asked), step + self.lag + 1)
        if self.engine.remote:
            self._send(stream, ahead, state, step - 1)
            return stream.take()
        for one in ahead:
            place, start = stream.prompts.get_state(), time.monotonic()
            rollout = self.sample(stream, one, state)  # its answers are here before updates overwrite the parameters
            t = rollout.sampled
            versions = jnp.full(t.tokens.shape, step - 1, jnp.int32, device=t.tokens.sharding)
            rollout = dataclasses.replace(rollout, sampled=t.replace(versions=versions))
            stream.add(place, rollout, time.monotonic() - start)
        return stream.take()

    def _send(self, stream: Any, steps: range, state: TrainState, version: int) -> None:
        """Give a remote engine this policy, in the middle of its answers too, and ask for the rollouts of `steps`.

        The thread that waits for the answers sees neither the stream nor the parameters, which updates overwrite.
        """
        engine: Any = self.engine
        prepared, moved = engine.take_weights(state.policy.plain(self.scorer.learner.model), version)
        for one in steps:
            place, batch = stream.prompts.get_state(), next(stream)
            given = (engine, prepared, batch, self.task, self._key(one), self.rewards, self.samples, moved)
            stream.send(place, functools.partial(collect.answered, *given))

    def in_flight(self, stream: Any) -> list[Arrays]:
        """The answers to prompts after the place of the stream; a remote engine is asked again."""
        return stream.sampled() if self.lag and not self.engine.remote else []

    def in_flight_like(self, state: TrainState) -> list[Arrays]:
        if not self.lag or self.engine.remote:
            return []
        model: Any = self.scorer.learner.model
        lengths = np.ones(self.prompts, np.int32)
        prompts = np.zeros((self.prompts, self.task.prompt_length), np.int32)

        def answers(params: Any) -> Arrays:
            t = self.engine.generate(params, prompts, lengths, lengths.astype(np.uint32), jax.random.key(0))
            return as_arrays(t.replace(versions=t.tokens))

        def placed(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.rollout_sharding(x, model.mesh))

        shapes = jax.eval_shape(answers, jax.eval_shape(lambda policy: policy.plain(model), state.policy))
        return [jax.tree.map(placed, shapes)] * self.lag

    def resume(self, stream: Any, place: Any, in_flight: Sequence[Any] = ()) -> None:
        """Go on from the place; answers that were in flight are verified again, to the same rewards."""
        stream.set_state(place)
        for arrays in in_flight:
            before, batch, t = stream.prompts.get_state(), next(stream), as_trajectory(arrays)
            stream.add(before, collect.verifying(self.engine, t, batch, self.task, self.rewards, self.samples))

    def sample(self, stream: Any, step: int, state: TrainState) -> collect.Rollout:
        """The answers of the rollout of a step, on their way through the verifier."""
        # The plain parameters are not kept: those of adapters are a copy.
        params = state.policy.plain(self.scorer.learner.model)
        how = self.sampling, self.rewards, self.samples, step - 1
        return collect.begin(self.engine, params, stream, self.task, self._key(step), *how)

    def _key(self, step: int) -> Key:
        return jax.random.fold_in(jax.random.key(self.seed), step)

    def layouts(self, trajectory: Trajectory, step: int) -> list[list[Layout]]:
        """The micro-batches of every minibatch, by epoch."""
        held, masks = processes.fetch((trajectory.segment_ids, trajectory.loss_mask))
        size, longest = self.engine.group_size, self.engine.max_new_tokens
        return epochs_of(held, masks, size, longest, self.updates, seed=self.seed, step=step)
