"""What every part of an objective is: a frozen dataclass whose fields are hyper-parameters, each declared once."""

import dataclasses
import types
import typing
from typing import Any, ClassVar, NamedTuple, TypeVar

T = TypeVar("T")
_SCALARS = (bool, int, float, str)


def hyperparameter(default: T, meaning: str) -> T:
    """A field of a part: its default and one line that `--help` and the documentation show.

        clip_low: float = hyperparameter(0.2, "ratio below 1 - clip_low is clipped")

    A plain `clip_low: float = 0.2` is a hyper-parameter too, but `--help` has no line for it.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning})


class Declaration(NamedTuple):
    """What is known of a hyper-parameter: its type in a config, its default, its line of explanation."""

    kind: type
    default: Any
    meaning: str
    optional: bool  # None is a value


@dataclasses.dataclass(frozen=True)
class Part:
    """Base of advantages, ratios, scores, surrogates, losses of pairs, aggregations, corrections and value losses.

    needs: arrays beyond logprobs, old_logprobs, advantages and mask that the part reads. A class variable, or a
      property where it depends on a hyper-parameter.
    whole_minibatch: the part computes something over all tokens of a minibatch, so micro-batches are refused.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    whole_minibatch: ClassVar[bool] = False

    def check(self, objective: Any) -> None:
        """Raises ValueError, naming the remedy, if the part does not fit the other parts of `objective`."""

    def formula(self) -> str:
        """The part as mathematics, for the line that a run opens with; definitions of its letters follow behind "; ".

        A class that does not define it is shown by its name and fields.
        """
        fields = (f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))
        return f"{type(self).__name__}({', '.join(fields)})"


def declarations(part: Part) -> dict[str, Declaration]:
    """{hyper-parameter: declaration} of a part, from the fields of its dataclass; the defaults are the part's values.

    Raises:
      ValueError: a field's type is none that a config can hold (bool, int, float, str or tuple, perhaps or None).
    """
    names = [field.name for field in dataclasses.fields(part)]
    return {name: declaration(type(part), name)._replace(default=getattr(part, name)) for name in names}


def declaration(cls: type, name: str) -> Declaration:
    """The declaration of one field of a dataclass. Raises as `declarations` does."""
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    hint = typing.get_type_hints(cls)[name]
    kind, optional = _kind(hint)
    if kind is None:
        raise ValueError(
            f"{cls.__name__}.{name} has type {hint}, which no config holds; "
            "declare it as bool, int, float, str or a tuple"
        )
    return Declaration(kind, field.default, field.metadata.get("meaning", ""), optional)


def _kind(hint: Any) -> tuple[type | None, bool]:
    """(the type in a config, whether None is allowed) of an annotation; no type if a config has none for it."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [m for m in members if m is not types.NoneType]
    kind = typing.get_origin(kinds[0]) or kinds[0]
    allowed = len(kinds) == 1 and (kind is tuple or kind in _SCALARS)
    return (kind if allowed else None), len(kinds) < len(members)
