"""What every part of an objective is: a frozen dataclass whose fields are hyper-parameters, each declared once."""

import dataclasses
from typing import Any, ClassVar

from jaxrl_llm.ground.declared import declared

# A field of a part: its default and one line that `--help` and the documentation show.
#
#     clip_low: float = hyperparameter(0.2, "ratio below 1 - clip_low is clipped")
#
# A plain `clip_low: float = 0.2` is a hyper-parameter too, but `--help` has no line for it.
hyperparameter = declared


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
