"""Parts of an objective: frozen dataclasses whose fields are hyper-parameters, each declared once."""

import dataclasses
from typing import Any, ClassVar

from jaxrl_llm.ground.declared import declaration, declared

# A field of a part: its default, one line for `--help` and the documentation, and its choices or limits.
#
#     clip_low: float = hyperparameter(0.2, "ratio below 1 - clip_low is clipped", above=0)
#
# A plain `clip_low: float = 0.2` is a hyper-parameter too, without a line and a check.
hyperparameter = declared


def check_fields(value: Any, prefix: str = "") -> None:
    """Raises ValueError unless every declared field of a dataclass has its type and is within its limits."""
    for field in dataclasses.fields(value):
        if field.metadata:
            declaration(type(value), field.name).checked(f"{prefix}{field.name}", getattr(value, field.name))


@dataclasses.dataclass(frozen=True)
class Part:
    """Base of advantages, ratios, scores, surrogates, losses of pairs, aggregations, corrections and value losses.

    needs: arrays beyond logprobs, old_logprobs, advantages and mask that the part reads. A class variable, or a
      property where it depends on a hyper-parameter.
    whole_minibatch: the part computes something over all tokens of a minibatch, so micro-batches are refused.
    prefix: of its fields' names in messages.
    equation: the part as mathematics, with its fields in braces, for the line that a run opens with; definitions of its
      letters follow behind "; ".
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    whole_minibatch: ClassVar[bool] = False
    prefix: ClassVar[str] = ""
    equation: ClassVar[str]

    def __post_init__(self) -> None:
        kind = type(self)
        if any(isinstance(value, dataclasses.Field) for value in vars(kind).values()):
            raise ValueError(
                f"{kind.__name__} has fields and is no dataclass; put @dataclasses.dataclass(frozen=True) above it"
            )
        check_fields(self, self.prefix)
        self.formula()

    def check(self, objective: Any) -> None:
        """Raises ValueError, naming the remedy, if the part does not fit the other parts of `objective`."""

    def formula(self) -> str:
        """The `equation` with its numbers; a class that defines none of its own is shown by its name and fields."""
        if "equation" in vars(type(self)):
            try:
                return self.equation.format(**vars(self))
            except (KeyError, IndexError, ValueError) as error:
                raise ValueError(
                    f"equation of {type(self).__name__}, {self.equation!r}: {error}; put only fields in braces "
                    f"({', '.join(vars(self)) or 'it has none'}), and double other braces"
                ) from error
        fields = (f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))
        return f"{type(self).__name__}({', '.join(fields)})"
