"""Rollouts that were asked for ahead of their step: they wait in the stream, their answers at the verifier."""

import collections
import dataclasses
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from flax.traverse_util import unflatten_dict

from jaxrl_llm.models import Routing
from jaxrl_llm.rollout.rollout import Rollout, Routes
from jaxrl_llm.training.collect import Draw
from jaxrl_llm.training.reward_sources import RolloutStream

Arrays = Mapping[str, Any]


class _Sampled(NamedTuple):
    answers: Any  # of the thread, from which `complete` makes the draw
    began: float  # on the monotonic clock
    ended: float


def _as_it_is(answers: Any) -> Draw:
    return answers


class _Asked(NamedTuple):
    place: Any  # where the prompts stood before it
    answer: "Future[_Sampled]"
    complete: Callable[[Any], Draw] = _as_it_is

    def draw(self) -> Draw:
        return self.complete(self.answer.result().answers)


@dataclasses.dataclass
class StreamAhead(RolloutStream):
    """A stream that holds the rollouts in flight, the next one first; its state is the place before their prompts."""

    asked: collections.deque[_Asked] = dataclasses.field(default_factory=collections.deque)
    worker: ThreadPoolExecutor | None = None  # of a remote engine
    ended: float = 0.0  # when the worker was done with the rollout that was taken last; 0: none was

    def add(self, place: Any, draw: Draw, seconds: float = 0.0) -> None:
        """Hold a rollout that is sampled; place: of the prompts before it, seconds: of sampling, 0 if not known."""
        answer: Future[_Sampled] = Future()
        answer.set_result(_Sampled(draw, 0.0, seconds))
        self.asked.append(_Asked(place, answer))

    def send(self, place: Any, begin: Callable[[], Any], complete: Callable[[Any], Draw] = _as_it_is) -> None:
        """Hold a rollout that another thread begins now, or after those that were sent before.

        complete: makes the draw of what `begin` returns, in the thread that takes it.
        """
        if self.worker is None:
            self.worker = ThreadPoolExecutor(1, "rollouts")
            # What nobody waits for any more is not asked, or the process would stay until it is answered.
            weakref.finalize(self, self.worker.shutdown, wait=False, cancel_futures=True)

        def timed() -> _Sampled:
            began = time.monotonic()
            return _Sampled(begin(), began, time.monotonic())

        self.asked.append(_Asked(place, self.worker.submit(timed), complete))

    def take(self) -> tuple[Draw, float, dict[str, float]]:
        """The next rollout, once it is sampled, the seconds that this took, and how long thread and caller waited."""
        start, waited = time.monotonic(), {}
        asked = self.asked.popleft()
        _, began, ended = asked.answer.result()
        if self.worker is not None:
            waited = {"time/trainer_waited_s": time.monotonic() - start}
            if self.ended:
                waited["time/engine_waited_s"] = began - self.ended
            self.ended = ended
        return asked.draw(), ended - began, waited

    def sampled(self) -> list[Arrays]:
        """The answers of all rollouts in flight; waits for them."""
        return [as_arrays(one.draw().rollout) for one in self.asked]

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()
        return state | {"prompts": self.asked[0].place} if self.asked else state


def as_arrays(rollout: Rollout) -> Arrays:
    """The arrays by name, those of the record behind "routes/": no types and no gaps, as a checkpoint holds them."""
    named = jax.tree_util.tree_leaves_with_path(rollout)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in named}


def as_rollout(arrays: Arrays) -> Rollout:
    """Return the rollout that `as_arrays` was given."""
    fields: Any = unflatten_dict(dict(arrays), sep="/")
    routes = {name: Routing(**record) for name, record in fields.pop("routes", {}).items()}
    return Rollout(**fields, routes=Routes(**routes))
