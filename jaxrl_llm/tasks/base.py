"""What a task is, what stands around its prompts, and the registry of task names."""

import contextlib
import dataclasses
import inspect
import math
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypedDict

import numpy as np

from jaxrl_llm.ground.declared import Declaration
from jaxrl_llm.ground.ranges import in_range, suggestion, within
from jaxrl_llm.tasks.messages import EARLIER, Message
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import Tokenizer
from jaxrl_llm.tasks.tokenizers.text_tokenizer import TextTokenizer

Row = Mapping[str, Any]
Draw = tuple[str, str] | tuple[str, str, Row]  # prompt, right answer, and other fields for the verifier
Verify = Callable[[str, str, str, Row], float]


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

    def text(self, tokenizer: Tokenizer, prompt: str, earlier: Sequence[Message] = ()) -> str:
        """The text that the model continues with its answer; earlier: what was said before the prompt.

        Raises:
            ValueError: chat=True with a tokenizer that has no chat template; earlier messages without chat=True.
        """
        question = self.template.replace(_PLACE, prompt)
        if not self.chat:
            if earlier:
                raise ValueError(
                    f"the prompt {prompt!r:.60} follows other messages, which a chat template writes; set "
                    "task.chat=True, with a tokenizer that has one"
                )
            return (tokenizer.start if isinstance(tokenizer, TextTokenizer) else "") + question
        if not isinstance(tokenizer, TextTokenizer):
            raise ValueError(
                "task.chat=True needs a tokenizer with a chat template; set model.pretrained or task.tokenizer to a "
                "checkpoint that has one, or task.chat=False"
            )
        own = self.system and not (earlier and earlier[0]["role"] == "system")
        messages = [*([{"role": "system", "content": self.system}] if own else []), *earlier]
        return tokenizer.chat([*messages, {"role": "user", "content": question}], **self.chat_options)


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set with splits of its own, "train" and "test"."""

    read: Callable[[], Mapping[str, Iterable[Draw]]]
    fingerprint: Callable[[], str]  # changes whenever `read` gives something else; every start of a run calls it


@dataclasses.dataclass(frozen=True)
class Task:
    """Prompts, a right answer to each, and the rule that scores any other answer.

    The prompts are drawn by `sample` or those of a `source`. An answer is untrusted text: if `verify` raises or returns
    no finite number, that is counted and the answer gets 0.
    """

    name: str
    prompt_length: int  # most tokens of a prompt, with what `prompting` puts around it
    answer_length: int  # most tokens of an answer, the end included
    tokenizer: Tokenizer
    verify: Verify  # (prompt, answer, gold, row) -> reward, any finite number
    sample: Callable[[np.random.Generator], Draw] | None = None
    source: Source | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # with defaults; they name the data on disk
    train_size: int = 8192  # with a source at most so many, 0 = all
    test_size: int = 512
    prompting: Prompting = dataclasses.field(default_factory=Prompting)
    drop_long: bool = False  # drawn prompts that are too long are dropped, as those of a source are; else they raise
    solved: float = 1.0  # the least reward of a right answer, as exact match and pass@k count it
    verify_truncated: bool = False  # verify an answer that was cut off by its bound; otherwise it gets 0
    # Run verify in a worker process, since it may hang or run code of others; it must be a function of a module.
    isolated: bool = False
    time_limit: float = 5.0  # seconds of one isolated verification, after which the worker is killed

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
        if not math.isfinite(self.solved):
            raise ValueError(
                f"{self.name}.solved={self.solved} must be finite; give the least reward of a right answer"
            )

    def ids_of_prompt(self, prompt: str, row: Row = MappingProxyType({})) -> list[int]:
        """What the model reads: the prompt with the text around it; row: its other fields, with earlier messages."""
        return self.tokenizer.encode(self.prompting.text(self.tokenizer, prompt, row.get(EARLIER, ())))

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


_REGISTRY: dict[str, Callable[..., Task]] = {}
_SIZES = ("train_size", "test_size")


def register(factory: Callable[..., Task]) -> Callable[..., Task]:
    """Decorator: makes `factory(*, option=default, ...) -> Task` known to `make` under its function name.

    Raises:
        ValueError: the name is taken by another factory, or an option has no default or a name that `make` uses.
    """
    name = factory.__name__
    taken = _REGISTRY.get(name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (factory.__module__, factory.__qualname__):
        raise ValueError(f"task {name!r} is already registered by {taken.__module__}; give the function another name")
    for option, parameter in inspect.signature(factory).parameters.items():
        if parameter.default is parameter.empty or option in (*_SIZES, "name", "tokenizer", "prompting"):
            raise ValueError(
                f"option {option!r} of task {name!r} needs a default and a name that no other task field has"
            )
    _REGISTRY[name] = factory
    return factory


def names() -> tuple[str, ...]:
    """The registered tasks, sorted."""
    return tuple(sorted(_REGISTRY))


def make(name: str, *, tokenizer: Tokenizer | None = None, prompting: Prompting | None = None, **options: Any) -> Task:
    """The task `name` with the tokenizer of the model that will answer, and `options` in place of its defaults.

    Every task also has the options `train_size` and `test_size`.

    Raises:
        ValueError: an unknown task or option, an option of another type than its default or out of range.
    """
    if name not in _REGISTRY:
        raise ValueError(f"unknown task {name!r}{suggestion(name, _REGISTRY)}; known tasks: {', '.join(names())}")
    own = {option: p.default for option, p in inspect.signature(_REGISTRY[name]).parameters.items()}
    known: dict[str, Any] = own | dict.fromkeys(_SIZES, 0)
    sizes: dict[str, Any] = {}
    for option, value in options.items():
        if option not in known:
            raise ValueError(
                f"task {name!r} has no option {option!r}{suggestion(option, known)}; its options: {', '.join(known)}"
            )
        kind = dict if isinstance(known[option], Mapping) else type(known[option])
        (own if option in own else sizes)[option] = Declaration(kind).typed(f"{name}.{option}", value)
    with users_code(name, "its factory"):
        made = _REGISTRY[name](**own)
    if not isinstance(made, Task):
        raise ValueError(f"task {name!r}: its factory returned {made!r:.60}; return a tasks.Task")
    task = dataclasses.replace(made, options=own, **sizes)
    if tokenizer is None and prompting is None:
        return task
    posed = dataclasses.replace(task, tokenizer=tokenizer or task.tokenizer, prompting=prompting or task.prompting)
    if task.source is not None or task.drop_long:
        return posed  # the bound is on the whole text, since longer prompts are dropped
    # The bound on a drawn prompt counts its characters, each at most one token of a byte-level tokenizer, so it grows
    # by the text around the prompt.
    return dataclasses.replace(posed, prompt_length=task.prompt_length + len(posed.ids_of_prompt("")))
