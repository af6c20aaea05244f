"""Tasks by name: those that come with the package, read at their first use, and those that others register."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.declared import Declaration
from jaxrl_llm.ground.ranges import suggestion
from jaxrl_llm.tasks.base import Prompting, Task, users_code
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import Tokenizer

BUILT_IN = ByName(
    {
        "addition": "jaxrl_llm.tasks.arithmetic",
        "calculator": "jaxrl_llm.tasks.environments.calculator",
        "countdown": "jaxrl_llm.tasks.countdown",
        "gsm8k": "jaxrl_llm.tasks.gsm8k",
        "guess": "jaxrl_llm.tasks.environments.guess",
        "jsonl": "jaxrl_llm.tasks.jsonl",
        "modular": "jaxrl_llm.tasks.modular",
        "python": "jaxrl_llm.tasks.environments.python_tool:python_tool",
        "reasoning_gym": "jaxrl_llm.tasks.reasoning",
        "skyrl_gym": "jaxrl_llm.tasks.environments.skyrl_gym_episodes",
        "sort": "jaxrl_llm.tasks.sort",
        "subtraction": "jaxrl_llm.tasks.arithmetic",
    }
)
_FOR_CHATS = ByName({"schemas": "jaxrl_llm.tasks.environments.tool_calls"})
_REGISTERED: dict[str, Callable[..., Task]] = {}
_SIZES = ("train_size", "test_size")  # options that every task has


def register(factory: Callable[..., Task]) -> Callable[..., Task]:
    """Decorator: makes `factory(*, option=default, ...) -> Task` known to `make` under its function name.

    Raises:
        ValueError: the name is taken by another factory, or an option has no default or a name that `make` uses.
    """
    name = factory.__name__
    taken = _REGISTERED.get(name) or BUILT_IN.get(name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (factory.__module__, factory.__qualname__):
        raise ValueError(f"task {name!r} is already registered by {taken.__module__}; give the function another name")
    for option, parameter in inspect.signature(factory).parameters.items():
        if parameter.default is parameter.empty or option in (*_SIZES, "name", "tokenizer", "prompting"):
            raise ValueError(
                f"option {option!r} of task {name!r} needs a default and a name that no other task field has"
            )
    _REGISTERED[name] = factory
    return factory


def names() -> tuple[str, ...]:
    """The names that `make` knows, sorted."""
    return tuple(sorted({*BUILT_IN, *_REGISTERED}))


def make(name: str, *, tokenizer: Tokenizer | None = None, prompting: Prompting | None = None, **options: Any) -> Task:
    """The task `name` with the tokenizer of the model that will answer, and `options` in place of its defaults.

    Every task also has the options `train_size` and `test_size`.

    Raises:
        ValueError: an unknown task or option, an option of another type than its default or out of range.
    """
    if name not in names():
        raise ValueError(f"unknown task {name!r}{suggestion(name, names())}; known tasks: {', '.join(names())}")
    factory = _REGISTERED.get(name) or BUILT_IN[name]
    own = {option: p.default for option, p in inspect.signature(factory).parameters.items()}
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
        made = factory(**own)
    if not isinstance(made, Task):
        raise ValueError(f"task {name!r}: its factory returned {made!r:.60}; return a tasks.Task")
    task = dataclasses.replace(made, options=own, asks=made.asks or _asked(factory, own), **sizes)
    if tokenizer is None and prompting is None:
        return task
    prompting = prompting or task.prompting
    if task.tools and prompting.chat:
        options = {"tools": _FOR_CHATS["schemas"](task.tools), **prompting.chat_options}
        prompting = dataclasses.replace(prompting, chat_options=options)
    posed = dataclasses.replace(task, tokenizer=tokenizer or task.tokenizer, prompting=prompting)
    if task.source is not None or task.drop_long:
        return posed  # the bound is on the whole text, since longer prompts are dropped
    # The bound on a drawn prompt counts its characters, each at most one token of a byte-level tokenizer, so it grows
    # by the text around the prompt.
    return dataclasses.replace(posed, prompt_length=task.prompt_length + len(posed.ids_of_prompt("")))


def _asked(factory: Callable[..., Task], options: Mapping[str, Any]) -> str:
    """The first sentence of the factory's docstring, with the values of the options that it names in backticks."""
    text = " ".join((inspect.getdoc(factory) or "").partition("\n\n")[0].split())
    sentence = re.split(r"[.;:](?:\s|$)", text, maxsplit=1)[0]
    return re.sub(r"`(\w+)`", lambda found: str(options.get(found[1], found[0])), sentence)
