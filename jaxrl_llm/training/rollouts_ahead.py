"""Rollouts that are asked for ahead of the step that trains on them.

With a lag k a step trains on the rollout that was asked for k steps before, of the policy of then; the first one asks
for k + 1, so that the age of what is trained on goes 0, 1, ..., k and stays there. Prompts and keys are those of the
rollout's own step, whatever the lag. The jax engine samples in turn with training, on the same devices, and what a lag
gains is that the verifier has k steps; a remote engine answers in a thread meanwhile.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.training import collect
from jaxrl_llm.training.in_flight import Arrays, StreamAhead, as_rollout
from jaxrl_llm.training.reward_sources import RolloutStream
from jaxrl_llm.training.rollouts import Rollouts, questions
from jaxrl_llm.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class RolloutsAhead(Rollouts):
    """A `Source` of rollouts with a lag."""

    lag: int = 1  # steps between asking for a rollout and training on it
    last: int = sys.maxsize  # step of the run, behind which a remote engine is asked for nothing
    kind_of_stream: ClassVar[type[RolloutStream]] = StreamAhead
    at_once: ClassVar[type[Rollouts]] = Rollouts  # the source without a lag

    def asked(self, stream: Any, step: int, state: TrainState) -> tuple[collect.Draw, float, dict[str, float]]:
        """Ask this policy for all up to `step + lag` that are not on their way, and return as `Rollouts.asked` does."""
        ahead = range(step + len(stream.asked), step + self.lag + 1)
        if self.engine.remote:
            self._send(stream, [one for one in ahead if one <= self.last], state, step - 1)
            return stream.take()
        for one in ahead:
            place, start = stream.prompts.get_state(), time.monotonic()
            draw = self.sample(stream, one, state)  # its answers are here before updates overwrite the parameters
            tokens = draw.rollout.tokens
            versions = jnp.full(tokens.shape, step - 1, jnp.int32, device=tokens.sharding)
            draw = dataclasses.replace(draw, rollout=draw.rollout.replace(versions=versions))
            stream.add(place, draw, time.monotonic() - start)
        return stream.take()

    def without_lag(self) -> Rollouts:
        return self.at_once(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self.at_once)})

    def _send(self, stream: Any, steps: Sequence[int], state: TrainState, version: int) -> None:
        """Give a remote engine this policy, in the middle of its answers too, and ask for the rollouts of `steps`.

        The thread that waits for the answers sees neither the stream nor the parameters, which updates overwrite.
        """
        engine: Any = self.engine
        weights, moved = engine.take_weights(state.policy.plain(self.scorer.learner.model), version)
        for one in steps:
            place, batch = stream.prompts.get_state(), next(stream)
            if jax.process_count() == 1:
                stream.send(place, functools.partial(self._answered, weights, batch, one, moved))
            else:
                begin = functools.partial(engine.asked, weights, *questions(batch), self._key(one))
                stream.send(place, begin, complete=functools.partial(self._together, batch, moved))

    def _together(self, batch: Any, moved: dict[str, float], asked: Any) -> collect.Draw:
        """The answers of several processes from what each has asked for: a collective, in the thread that trains."""
        engine: Any = self.engine
        return self._verifying(engine.gathered(asked), batch, moved)

    def in_flight(self, stream: Any) -> list[Arrays]:
        """The answers to prompts after the place of the stream; a remote engine is asked again."""
        return [] if self.engine.remote else stream.sampled()

    def resume(self, stream: Any, place: Any, in_flight: Sequence[Any] = ()) -> None:
        """Go on from the place; answers that were in flight are verified again, to the same rewards."""
        super().resume(stream, place)
        for arrays in in_flight:
            before, batch = stream.prompts.get_state(), next(stream)
            stream.add(before, self._verifying(as_rollout(arrays), batch, {}))
