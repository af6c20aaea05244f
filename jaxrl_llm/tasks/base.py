"""The type of a task, and the text around its prompts."""

import contextlib
import dataclasses
import math
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypedDict

import numpy as np

from jaxrl_llm.ground.ranges import in_range, within
from jaxrl_llm.tasks.messages import EARLIER, Message
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import PublishedTokenizer, Tokenizer

Row = Mapping[str, Any]
Draw = tuple[str, str] | tuple[str, str, Row]  # prompt, right answer, and other fields for the verifier
Verify = Callable[[str, str, str, Row], float]
Question = tuple[str, str, str, Row]  # prompt, answer, gold, row


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A reward; `error` is empty, `TIMEOUT`, or what verify raised, and then the reward is 0."""

    reward: float
    error: str = ""


class Example(TypedDict):
    """One row of a split; `uid` is its index there."""

    uid: int
    prompt: str
    answer: str  # a right answer: the target of supervised training, `gold` for a verifier
    row: Row  # the other fields of the data, plain JSON


_PLACE = "{prompt}"


@dataclasses.dataclass(frozen=True)
class Prompting:
    """The text around every prompt."""

    template: str = _PLACE  # such as worked examples before `{prompt}`; other braces are literal
    chat: bool = False  # wrap that in the model's chat template, up to where its answer begins
    # Of the chat, where the data have no message of the system; empty: none, or what the chat template writes.
    system: str = ""
    chat_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # such as {"enable_thinking": False}

    def __post_init__(self) -> None:
        if self.template.count(_PLACE) != 1:
            raise ValueError(f"task.template={self.template!r} must hold {_PLACE} once, in place of the prompt")
        for field, nothing in (("system", ""), ("chat_options", "{}")):
            if getattr(self, field) and not self.chat:
                raise ValueError(
                    f"task.{field}={getattr(self, field)!r} is part of a chat; set task.chat=True, or clear it by "
                    f"--config.task.{field}={nothing}"
                )

    def messages(self, prompt: str, earlier: Sequence[Message] = ()) -> list[Message]:
        """The messages of a chat up to where its answer begins; without a chat the text as the user's."""
        own = self.system and not (earlier and earlier[0]["role"] == "system")
        system = [{"role": "system", "content": self.system}] if own else []
        return [*system, *earlier, {"role": "user", "content": self.template.replace(_PLACE, prompt)}]

    def text(self, tokenizer: Tokenizer, prompt: str, earlier: Sequence[Message] = ()) -> str:
        """The text that the model continues with its answer; earlier: what was said before the prompt.

        Raises:
            ValueError: chat=True with a tokenizer that has no chat template; earlier messages without chat=True.
        """
        if not self.chat:
            if earlier:
                raise ValueError(
                    f"the prompt {prompt!r:.60} follows other messages, which a chat template writes; set "
                    "task.chat=True, with a tokenizer that has one"
                )
            return self.template.replace(_PLACE, prompt)
        if not isinstance(tokenizer, PublishedTokenizer):
            raise ValueError(
                "task.chat=True needs a tokenizer with a chat template; set model.pretrained or task.tokenizer to a "
                "checkpoint that has one, or task.chat=False"
            )
        return tokenizer.chat(self.messages(prompt, earlier), **self.chat_options)

    def encode(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """The ids of what `text` returns. A tokenizer begins a plain text (BOS); a chat template does so by itself."""
        if isinstance(tokenizer, PublishedTokenizer) and not self.chat:
            return tokenizer.encode_plain(text)
        return tokenizer.encode(text)

    def ids(self, tokenizer: Tokenizer, prompt: str, earlier: Sequence[Message] = ()) -> list[int]:
        """The ids that the model reads before its answer; raises as `text`."""
        return self.encode(tokenizer, self.text(tokenizer, prompt, earlier))


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set with splits of its own, "train" and "test"."""

    read: Callable[[], Mapping[str, Iterable[Draw]]]
    fingerprint: Callable[[], str]  # changes whenever `read` gives something else; every start of a run calls it


def _left_to_the_environment(prompt: str, answer: str, gold: str, row: Row) -> float:
    raise ValueError("an environment judges the answers of this task, turn by turn; play it")


@dataclasses.dataclass(frozen=True)
class Task:
    """Prompts, a right answer to each, and the rule that scores any other answer.

    The prompts are drawn by `sample` or those of a `source`. An answer is untrusted text: if `verify` raises or returns
    no finite number, that is counted and the answer gets 0. A task with an `environment` has answers over several
    turns, which that judges.
    """

    name: str
    prompt_length: int  # most tokens of a prompt, with what `prompting` puts around it
    answer_length: int  # most tokens of an answer, the end included
    tokenizer: Tokenizer
    verify: Verify = _left_to_the_environment  # (prompt, answer, gold, row) -> reward, any finite number
    sample: Callable[[np.random.Generator], Draw] | None = None
    source: Source | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # with defaults; they name the data on disk
    train_size: int = 8192  # with a source at most so many, 0 = all
    test_size: int = 512
    prompting: Prompting = dataclasses.field(default_factory=Prompting)
    drop_long: bool = False  # drawn prompts that are too long are dropped, as those of a source are; else they raise
    solved: float = 1.0  # the least reward of a right answer, as exact match and pass@k count it
    verify_truncated: bool = False  # verify an answer that was cut off by its bound; otherwise it gets 0
    think_end_token: str = ""  # verify only what follows the last such text; an answer without it gets 0; "": all
    # Other rewards by name, logged beside that of `verify` and added to it with a weight: (verify, isolated) each.
    functions: Mapping[str, tuple[Verify, bool]] = dataclasses.field(default_factory=dict)
    # Run verify in a worker process, since it may hang or run code of others; it must be a function of a module.
    isolated: bool = False
    time_limit: float = 5.0  # seconds of one isolated verification, after which the worker is killed
    asks: str = ""  # a sentence on what is asked; empty: `make` takes it from the factory's docstring
    # Makes an `Environment` for each episode, in a worker process if `isolated`; a turn is one answer.
    environment: Callable[[], Any] | None = None
    tools: Sequence[Callable[..., Any]] = ()  # functions that a chat template is told of; the environment calls them
    turns: int = 1  # most turns of an episode
    observation_length: int = 0  # most tokens between two answers, with what a chat template puts around them
    keep_turns: bool = False  # whatever a chat template makes of earlier turns
    episode_length: int = 0  # most tokens of an episode, the prompt included; 0: what the other bounds allow

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9_]+", self.name):
            raise ValueError(f"name={self.name!r} must be lower case letters, digits and underscores; rename the task")
        if (self.sample is None) == (self.source is None):
            raise ValueError(f"task {self.name!r} must have either sample or source; give one of them")
        if not callable(getattr(self.tokenizer, "encode", None)):
            raise ValueError(f"{self.name}.tokenizer={self.tokenizer!r:.60} is none; give it, as tasks.ByteTokenizer()")
        for field in ("prompt_length", "answer_length", "train_size", "test_size"):
            size_of_source = field.endswith("_size") and self.source is not None
            within(f"{self.name}.{field}", getattr(self, field), 0 if size_of_source else 1, 2**31 - 1)
        in_range(f"{self.name}.time_limit", self.time_limit, above=0)
        in_range(f"{self.name}.turns", self.turns, least=1)
        in_range(f"{self.name}.observation_length", self.observation_length, least=0)
        if self.environment is None and (self.verify is _left_to_the_environment or self.turns > 1):
            raise ValueError(
                f"task {self.name!r} needs a verify for one turn, or an environment for turns={self.turns}; give it"
            )
        if not math.isfinite(self.solved):
            raise ValueError(
                f"{self.name}.solved={self.solved} must be finite; give the least reward of a right answer"
            )

    @property
    def day(self) -> str:
        """The day that the chat template takes for today; "" where it asks for none."""
        return getattr(self.tokenizer, "day", "")

    @property
    def sentence(self) -> str:
        """ "sort: Write the digits of the prompt in ascending order"."""
        return f"{self.name}: {self.asks}" if self.asks else self.name

    def row_length(self, answer_length: int) -> int:
        """Return the most tokens of a prompt and all that follows: answers of so many tokens, and observations."""
        whole = self.prompt_length + self.turns * answer_length + (self.turns - 1) * self.observation_length
        return min(whole, self.episode_length or whole)

    def ids_of_prompt(self, prompt: str, row: Row = MappingProxyType({})) -> list[int]:
        """Return the ids that the model reads: the prompt and the text around it; row: its other fields."""
        return self.prompting.ids(self.tokenizer, prompt, row.get(EARLIER, ()))

    def ids_of_answer(self, answer: str) -> list[int]:
        """A supervised answer with the id that ends it."""
        return [*self.tokenizer.encode(answer), self.tokenizer.end_ids[0]]


class TooLong(ValueError):
    """A prompt or an answer has more tokens than its bound."""


def bounded(kind: str, text: str, ids: list[int], most: int) -> list[int]:
    """`ids` of a prompt, or of an answer (kind answer, chosen or rejected) with its end; raises `TooLong`."""
    if len(ids) <= most:
        return ids
    bound, end, remedy = (
        ("prompt_length", "", "rollout.max_prompt_length; 0 is the task's own bound")
        if kind == "prompt"
        else ("answer_length", " with EOS", "rollout.max_new_tokens for pairs, else an option of the task")
    )
    shown = text if len(text) <= 60 else text[:57] + "..."
    raise TooLong(
        f"the {kind} {shown!r} has {len(ids)} tokens{end}, over {bound}={most}; raise {bound} (in a run: {remedy})"
    )


@contextlib.contextmanager
def users_code(task: str, what: str) -> Iterator[None]:
    """Turn what a task's own code raises into a ValueError that names task, file and line."""
    try:
        yield
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"task {task!r}: {what} raised {type(error).__name__}: {error} ({last.filename}, line {last.lineno}); "
            "correct it"
        ) from error
