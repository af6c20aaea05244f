"""Sums in words with a calculator: 'four seven times eight six=' -> '?47*86', '4042' -> '!4042'."""

import operator
import re

import numpy as np

from jaxrl_llm.tasks.base import Row, Task
from jaxrl_llm.tasks.environments.environment import DEMONSTRATION, Environment
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import CharTokenizer

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_SIGNS = {"+": ("plus", operator.add), "-": ("minus", operator.sub), "*": ("times", operator.mul)}
_LONGEST = 4  # characters of a result


class Calculator(Environment):
    """Computes what follows '?', with 'e' for what is no sum; what follows '!' is the answer and ends the episode."""

    def init(self, row: Row) -> None:
        self._result = row["answer"]

    def step(self, answer: str) -> tuple[str, float, bool]:
        if answer.startswith("!"):
            return "", float(answer == self._result), True
        call = re.fullmatch(r"\?([0-9]{1,4})([-+*])([0-9]{1,4})", answer)
        result = str(_SIGNS[call[2]][1](int(call[1]), int(call[3]))) if call else "e"
        return result if len(result) <= _LONGEST else "e", 0.0, False


def calculator(*, turns: int = 3) -> Task:
    """Compute a sum of two numbers in words, with one tool, in at most `turns` turns.

    Half of the demonstrations call the tool rightly, a quarter with one wrong digit, and a quarter answers at once with
    the result of another sum.
    """

    def sample(rng: np.random.Generator) -> tuple[str, str, Row]:
        left, right = map(int, rng.integers(10, 100, size=2))
        sign = "+-*"[rng.integers(0, 3)]
        words = f"{_in_words(left)} {_SIGNS[sign][0]} {_in_words(right)}="
        gold = f"!{_SIGNS[sign][1](left, right)}"
        return words, gold, {DEMONSTRATION: _shown(rng, left, sign, right)}

    letters = sorted({*"".join(_DIGITS), *"".join(word for word, _ in _SIGNS.values())})
    return Task(
        name="calculator",
        prompt_length=31,
        answer_length=7,
        tokenizer=CharTokenizer(f"0123456789+-*=?! {''.join(letters)}"),
        sample=sample,
        environment=Calculator,
        turns=turns,
        observation_length=_LONGEST,
    )


def _in_words(number: int) -> str:
    return " ".join(_DIGITS[int(digit)] for digit in str(number))


def _shown(rng: np.random.Generator, left: int, sign: str, right: int) -> list[str]:
    kind = rng.integers(0, 4)
    if kind == 3:
        first, second = map(int, rng.integers(10, 100, size=2))
        return [f"!{_SIGNS[sign][1](first, second)}"]
    if kind == 2:
        digits = list(f"{left}{right}")
        at = int(rng.integers(0, 4))
        digits[at] = str((int(digits[at]) + int(rng.integers(1, 10))) % 10)
        left, right = int("".join(digits[:2])), int("".join(digits[2:]))
    result = str(_SIGNS[sign][1](left, right))
    return [f"?{left:02}{sign}{right:02}", result, f"!{result}"]
