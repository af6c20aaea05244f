"""The protocol of an environment, and what it may say."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxrl_llm.ground.worker_errors import described
from jaxrl_llm.tasks.base import Row
from jaxrl_llm.tasks.messages import GIVEN, Message, message

DEMONSTRATION = "demonstration"  # the field of a row with [answer, observation, answer, ...] to be imitated

Observation = str | Sequence[Message]  # a text, or messages of a chat; a text is one of the user there


@runtime_checkable
class Environment(Protocol):
    """One episode. The model reads first messages, then each observation, and answers after each."""

    def init(self, row: Row) -> Observation | None:
        """Begin an episode; return first messages, the same for the same row, or None for the row's prompt.

        row: "prompt", "answer" and the other fields of the data.
        """
        ...

    def step(self, answer: str) -> tuple[Observation, float, bool]:
        """Return what the model reads next, the reward of this answer, and whether the episode is over."""
        ...

    def close(self) -> None:
        """Free what the episode holds: nothing, unless a subclass says so."""


class Step(NamedTuple):
    """An environment's word on a row or an answer.

    observation: after `init` the first messages, "" for the prompt of the row.
    error: "", or why the episode is over, with a reward of 0.
    """

    observation: Observation = ""
    reward: float = 0.0
    done: bool = True
    error: str = ""


# "init", "step" or "close", and the row or the answer by the number of an episode; one that fails says so in `error`.
Ask = Callable[[str, Mapping[int, Any]], dict[int, Step]]


def here(make: Callable[[], Environment]) -> Ask:
    """Return a function that plays episodes in this process, without limits."""
    episodes = dict[int, Environment]()

    def one(number: int, what: str, given: Any) -> Step:
        try:
            if what == "init":
                episodes[number] = make()
            return _told(episodes[number], what, given)
        except Exception as error:
            return Step(error=described(error))

    return lambda what, given: {number: one(number, what, each) for number, each in given.items()}


def _told(environment: Environment, what: str, given: Any) -> Step:
    """Call the method `what`; raises what it raises, and ValueError where it returns something else."""
    if what == "init":
        begun = environment.init(given)
        return Step("" if begun is None else _first(begun), done=False)
    if what == "close":
        environment.close()
        return Step()
    said = environment.step(given)
    if not isinstance(said, tuple) or len(said) != 3:
        raise ValueError(f"step returned {said!r:.80}; return (observation, reward, done)")
    observation, reward, done = said
    if not isinstance(observation, str):
        if not isinstance(observation, list | tuple):
            raise ValueError(f"step returned the observation {observation!r:.80}; return a text, or messages")
        observation = [message("observation", one) for one in observation]
    if not math.isfinite(float(reward)):
        raise ValueError(f"step returned the reward {reward!r:.80}; return a finite number")
    return Step(observation, float(reward), bool(done))


def _first(begun: Any) -> list[Message]:
    """Return the messages of `init`, the last one of the user."""
    given = [{"role": "user", "content": begun}] if isinstance(begun, str) else begun
    said = [message("init", one) for one in given] if isinstance(given, list | tuple) else []
    if not said or said[-1]["role"] != "user" or not said[-1]["content"]:
        raise ValueError(
            f"init returned {begun!r:.80}; return a text, messages of which the last is one of the user, or None for "
            "the row's prompt"
        )
    return said


def text_of(observation: Observation) -> str:
    """The observation as a person reads it."""
    return observation if isinstance(observation, str) else "\n".join(one["content"] for one in observation)


def row_of(example: Mapping[str, Any]) -> Row:
    """Return what `Environment.init` is given of an example with its prompt, its answer and its row."""
    row = example["row"]
    return row[GIVEN] if GIVEN in row else {**row, "prompt": example["prompt"], "answer": example["answer"]}
