"""What a task is, and the registry of task names."""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import numpy as np

from jaxrl_llm.tasks.tokenizer import CharTokenizer

__all__ = ["Example", "Task", "check_range", "make", "names", "register"]


class Example(TypedDict):
    """One row of a split; `uid` is its index there."""

    uid: int
    prompt: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Task:
    """A source of prompts, a supervised answer to each, and the rule that scores any other answer.

    Args:
        name: lower case letters, digits and underscores.
        prompt_length: most tokens of a prompt.
        answer_length: most tokens of an answer, EOS included.
        tokenizer: characters to ids.
        sample: draws one (prompt, supervised answer) from a numpy Generator. The prompt alone decides what is right.
        verify: (prompt, answer) -> reward in [0, 1]; the answer is untrusted text and never raises.
        options: what `make` was called with, defaults filled in; becomes part of the name of the data on disk.
        train_size: examples of the train split.
        test_size: examples of the test split; no prompt is in both splits.

    Raises:
        ValueError: a field is out of range.
    """

    name: str
    prompt_length: int
    answer_length: int
    tokenizer: CharTokenizer
    sample: Callable[[np.random.Generator], tuple[str, str]]
    verify: Callable[[str, str], float]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    train_size: int = 8192
    test_size: int = 512

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9_]+", self.name):
            raise ValueError(f"name={self.name!r} must be lower case letters, digits and underscores; rename the task")
        for field in ("prompt_length", "answer_length", "train_size", "test_size"):
            check_range(f"{self.name}.{field}", getattr(self, field), 1, 2**31 - 1)


_REGISTRY: dict[str, Callable[..., Task]] = {}


def register(factory: Callable[..., Task]) -> Callable[..., Task]:
    """Decorator: makes `factory(*, option=default, ...) -> Task` known to `make` under its function name.

    Raises:
        ValueError: the name is taken by another factory, or an option has no default.
    """
    name = factory.__name__
    taken = _REGISTRY.get(name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (factory.__module__, factory.__qualname__):
        raise ValueError(f"task {name!r} is already registered by {taken.__module__}; give the function another name")
    for option, parameter in inspect.signature(factory).parameters.items():
        if parameter.default is parameter.empty or option in ("train_size", "test_size"):
            raise ValueError(
                f"option {option!r} of task {name!r} needs a default and a name that no other task field has"
            )
    _REGISTRY[name] = factory
    return factory


def names() -> tuple[str, ...]:
    """The registered tasks, sorted."""
    return tuple(sorted(_REGISTRY))


def make(name: str, **options: Any) -> Task:
    """The task `name` with `options` in place of its defaults.

    Args:
        name: one of `names()`.
        options: the task's own options, and `train_size`, `test_size`, which every task has.

    Raises:
        ValueError: an unknown task or option, an option of another type than its default or out of range.
    """
    if name not in _REGISTRY:
        raise ValueError(f"unknown task {name!r}{_suggest(name, _REGISTRY)}; known tasks: {', '.join(names())}")
    own = {option: p.default for option, p in inspect.signature(_REGISTRY[name]).parameters.items()}
    sizes = {
        field.name: field.default for field in dataclasses.fields(Task) if field.name in ("train_size", "test_size")
    }
    for option, value in options.items():
        known = own | sizes
        if option not in known:
            raise ValueError(
                f"task {name!r} has no option {option!r}{_suggest(option, known)}; its options: {', '.join(known)}"
            )
        if type(value) is not type(known[option]):
            raise ValueError(
                f"{name}.{option}={value!r} must be of type {type(known[option]).__name__}, "
                f"as its default {known[option]!r} is; pass such a value"
            )
    own |= {option: value for option, value in options.items() if option in own}
    sizes |= {option: value for option, value in options.items() if option in sizes}
    return dataclasses.replace(_REGISTRY[name](**own), options=own, **sizes)


def check_range(option: str, value: int, low: int, high: int) -> None:
    """Raises ValueError unless low <= value <= high."""
    if not low <= value <= high:
        raise ValueError(f"{option}={value} must lie in {low}..{high}; choose a value in that range")


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
