"""One declaration of every field: its default, type, range or choices, and meaning.

Checks, `--help`, the hints for a mistyped field, configs/base.py and docs/configuration.md follow from it.
"""

import ast
import collections.abc
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from jaxrl_llm.ground.ranges import in_range, one_of

T = TypeVar("T")
REQUIRED: Any = dataclasses.MISSING  # in place of a default


def declared(
    default: T, meaning: str = "", *, among: Iterable[str] | Mapping[str, str] = (), **limits: int | float
) -> T:
    """A field of a dataclass: its default, one line on what it means, and its choices or its limits.

    prompts: int = declared(32, "prompts per step", least=1)
    schedule: str = declared("constant", among=("constant", "linear", "cosine"))
    replay: str = declared("off", among={"off": "", "R2": "of the scoring pass", "R3": "of the rollout"})

    limits: least, above, most and below, as `in_range` takes them.
    """
    choices = among if isinstance(among, Mapping) else dict.fromkeys(among, "")
    metadata = {"meaning": meaning, "among": choices, "limits": limits}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: typing.cast(T, dict(default)), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared_by(cls: type, name: str, default: Any = dataclasses.MISSING) -> Any:
    """A field with the declaration that it has in another class, and its default unless one is given."""
    own = _field(cls, name)
    return dataclasses.field(default=own.default if default is dataclasses.MISSING else default, metadata=own.metadata)


class Declaration(NamedTuple):
    """A field of a config: its type, default, meaning and range."""

    kind: type
    default: Any = None
    meaning: str = ""
    optional: bool = False  # None is a value
    element: Any = object  # type of a tuple's elements
    limits: Mapping[str, Any] = types.MappingProxyType({})  # arguments of `in_range`
    among: Mapping[str, str] = types.MappingProxyType({})  # {choice: what it is}

    @property
    def comment(self) -> str:
        """The choices and the meaning, in one line."""
        return ": ".join(part for part in (self.choices, self.meaning) if part)

    @property
    def choices(self) -> str:
        return " | ".join(f"{choice} ({what})" if what else choice for choice, what in self.among.items())

    def read(self, name: str, text: str) -> Any:
        """The value that a text on the command line stands for; raises ValueError if it is of another type.

        Of the kind `object`, a task's option that is not in the config, it may be any literal or word.
        """
        if self.kind is str:
            return text
        if text == "None":
            return None
        try:
            value = _READERS.get(self.kind, ast.literal_eval)(text)
        except (ValueError, KeyError, SyntaxError):
            value = text
        return self.typed(name, value, shown=text)

    def typed(self, name: str, value: Any, shown: str = "") -> Any:
        """The value as the field's type: an int may stand for a float and a list for a tuple.

        Raises ValueError for any other type; the message shows the value as `shown`.
        """
        if value is None and self.optional:
            return None
        if self.kind is float and type(value) is int:
            value = float(value)
        if self.kind is tuple and isinstance(value, list | tuple):
            value = tuple(float(one) if self.element is float and type(one) is int else one for one in value)
        elements = value if isinstance(value, tuple) else ()
        if not (_is(value, self.kind) and all(_is(one, self.element) for one in elements)):
            wanted = _EXAMPLES.get((self.element, ...) if self.kind is tuple else self.kind, f"a {self.kind.__name__}")
            raise ValueError(f"{name}={shown or repr(value)} must be {wanted}")
        return value

    def checked(self, name: str, value: Any) -> Any:
        """Return `typed(name, value)`; a value out of range or outside the choices raises ValueError too."""
        value = self.typed(name, value)
        if value is None:
            return None
        if self.limits:
            in_range(name, value, self.meaning, **self.limits)
        if self.among:
            one_of(name, value, self.among)
        return value


_READERS: dict[type, Any] = {
    bool: lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()],
    int: int,
    float: float,
}
_EXAMPLES: dict[Any, str] = {  # of every type that a config holds; (int, ...) are tuples of whole numbers
    bool: "True or False",
    int: "a whole number, for example 4",
    float: "a number, for example 1e-3",
    str: "a word or a path, for example none",
    dict: 'a dict, for example {"digits": 10}',
    (int, ...): "a tuple of whole numbers, for example (1, 2)",
    (float, ...): "a tuple of numbers, for example (1.0, 2.0)",
    (object, ...): "a tuple, for example (1, 2)",
}


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, Mapping if kind is dict else kind) and (kind is not int or not isinstance(value, bool))


def _field(cls: type, name: str) -> dataclasses.Field[Any]:
    return next(field for field in dataclasses.fields(cls) if field.name == name)


@functools.cache
def declaration(cls: type, name: str) -> Declaration:
    """The declaration of one field of a dataclass; a plain `clip_low: float = 0.2` is one without a meaning.

    Raises ValueError for a type that no config can hold.
    """
    field, hint = _field(cls, name), typing.get_type_hints(cls)[name]
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [member for member in members if member is not types.NoneType]
    kind = typing.get_origin(kinds[0]) or kinds[0]
    if len(kinds) > 1 or kind not in (bool, int, float, str, tuple, collections.abc.Mapping):
        raise ValueError(
            f"{cls.__name__}.{name} has type {hint}, which no config holds; "
            "declare it as bool, int, float, str or a tuple"
        )
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return Declaration(
        dict if kind is collections.abc.Mapping else kind,
        default,
        field.metadata.get("meaning", ""),
        len(kinds) < len(members),
        typing.get_args(kinds[0])[0] if kind is tuple else object,
        field.metadata.get("limits", {}),
        field.metadata.get("among", {}),
    )


def declarations(of: Any) -> dict[str, Declaration]:
    """{field: declaration} of a dataclass; of an instance, whose values are the defaults then. Raises as above."""
    cls = of if isinstance(of, type) else type(of)
    own = {field.name: declaration(cls, field.name) for field in dataclasses.fields(cls)}
    return own if of is cls else {name: one._replace(default=getattr(of, name)) for name, one in own.items()}


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a config: a frozen dataclass whose fields are of their declared type and range, and finite.

    The first line of its docstring says what the block is, wherever the fields are listed. Messages name a field
    behind the `prefix`: class OptimizerConfig(Block, prefix="optimizer.").
    """

    _prefix: ClassVar[str]

    def __init_subclass__(cls, prefix: str) -> None:
        cls._prefix = prefix

    def __post_init__(self) -> None:
        for name, own in declarations(type(self)).items():
            value = own.checked(f"{self._prefix}{name}", getattr(self, name))
            parts = value if isinstance(value, tuple) else (value,)
            if any(isinstance(part, float) and not math.isfinite(part) for part in parts):
                raise ValueError(f"{self._prefix}{name}={value} must be finite")
        self.check()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Any:
        """The block with these values of a file or of the command line, as `Declaration.typed` takes them."""
        own = declarations(cls)
        return cls(**{name: own[name].typed(f"{cls._prefix}{name}", value) for name, value in values.items()})

    def check(self) -> None:
        """Raises ValueError, naming the remedy, if fields of the block contradict each other."""
