"""Verifiers of text by name: `exact`, `numeric`, `math`, or a user's function.

Each takes (prompt, answer, gold, row) and returns a reward; it is an object that a worker process can unpickle.
"""

import dataclasses
import importlib.util
import logging
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.ground.ranges import suggestion
from jaxrl_llm.tasks.verifiers.answer_grammar import final_answer, gold_answer, gold_number, number
from jaxrl_llm.tasks.verifiers.formulas import same_formula
from jaxrl_llm.tasks.verifiers.user_verifier import UserVerifier


def verifier(spec: str) -> tuple[Callable[[str, str, str, Mapping[str, Any]], float], bool]:
    """(verify, isolated) of "exact", "numeric", "math", "package.module:function" or "file.py:function".

    Raises:
        ValueError: the name is unknown, or there is no such function.
        ImportError: what the verifier needs is not installed.
    """
    if ":" in spec:
        user = UserVerifier(spec)
        user.load()
        return user, True
    if spec == "math":
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("the verifier math needs math-verify; pip install 'jaxrl_llm[tasks]'")
        return MathVerifier(), True
    plain = {"exact": exact, "numeric": numeric}
    if spec not in plain:
        raise ValueError(
            f"verifier={spec!r} is unknown{suggestion(spec, [*plain, 'math'])}; use exact, numeric, math, "
            "package.module:function or file.py:function"
        )
    return plain[spec], False


def exact(prompt: str, answer: str, gold: str, row: Mapping[str, Any]) -> float:
    """1 if the answer is the right one, apart from spaces around it."""
    return float(answer.strip() == gold.strip())


def numeric(prompt: str, answer: str, gold: str, row: Mapping[str, Any]) -> float:
    """1 if the answer is the number that the right answer is, as exact fractions; 0 if that is no number."""
    right = gold_number(gold)
    return float(right is not None and number(answer) == right)


@dataclasses.dataclass(frozen=True)
class MathVerifier:
    """1 if the answer equals the right one as a number, as words, or as math-verify reads formulas, sets, intervals."""

    def load(self) -> None:
        import math_verify

        # It says at each call that its own limits are off. They raise in threads; the worker's limit kills.
        logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)

    def __call__(self, prompt: str, answer: str, gold: str, row: Mapping[str, Any]) -> float:
        given = final_answer(answer)
        if given is None:
            return 0.0
        if (right_number := gold_number(gold)) is not None and (given_number := number(answer)) is not None:
            return float(given_number == right_number)
        return float(same_formula(given.text, gold_answer(gold)))
