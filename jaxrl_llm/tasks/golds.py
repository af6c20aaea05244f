"""Right answers of a row: any of several is right. gold_fields.py reads them."""

import dataclasses
import math
from typing import Any

from jaxrl_llm.tasks.base import Row, Verify

OTHERS = "other_right_answers"  # the field of an example's row with the right answers after the first
NOTHING = ("", "null", "NaN")  # texts of a right answer that is not there


def every(gold: str, row: Row) -> tuple[str, ...]:
    """All right answers of a row."""
    return (gold, *row.get(OTHERS, ()))


@dataclasses.dataclass(frozen=True)
class AnyRight:
    """The best reward that a verifier gives an answer over all right answers of its row, a finite number."""

    verify: Verify

    def load(self) -> None:
        if load := getattr(self.verify, "load", None):
            load()

    def __call__(self, prompt: str, answer: str, gold: str, row: Row) -> float:
        rewards = [float(self.verify(prompt, answer, one, row)) for one in every(gold, row)]
        for reward in rewards:
            if not math.isfinite(reward):
                raise ValueError(f"the reward {reward!r} is not finite; return a finite number")
        return max(rewards)


def named(verify: Verify) -> str:
    """The name of a verifier of `named_verifiers`, which must find right answers right as they stand; or "".

    A rule of the user's own may ask for more than the right answer, a tag around it for example.
    """
    rule: Any = verify.verify if isinstance(verify, AnyRight) else verify
    own = rule.__module__ == "jaxrl_llm.tasks.verifiers.named_verifiers"
    return getattr(rule, "__name__", type(rule).__name__) if own else ""
