"""A number to be guessed: 'xyz20-50:' -> '35', 'h' -> '43', 'l' -> ... until it is hit."""

import numpy as np

from jaxrl_llm.ground.ranges import within
from jaxrl_llm.tasks.base import Row, Task
from jaxrl_llm.tasks.environments.environment import DEMONSTRATION, Environment
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import CharTokenizer

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Guessing(Environment):
    """Says whether the hidden number is higher or lower; a hit earns 1, and what is no number of the range ends it."""

    def init(self, row: Row) -> None:
        self._low, self._high, self._hidden, self._left = row["low"], row["high"], row["hidden"], row["turns"]

    def step(self, answer: str) -> tuple[str, float, bool]:
        self._left -= 1
        if not (len(answer) == 2 and answer.isdecimal() and self._low <= int(answer) <= self._high):
            return "", 0.0, True
        if int(answer) == self._hidden:
            return "", 1.0, True
        return "h" if self._hidden > int(answer) else "l", 0.0, not self._left


def guess(*, numbers: int = 31, turns: int = 5) -> Task:
    """Guess a number out of `numbers` in at most `turns` turns: each answer is two digits and hears higher or lower.

    Halving the range wins always if numbers < 2**turns. The demonstrations guess uniformly in what is left of it; the
    three letters of a prompt only tell prompts apart.
    """
    within("guess.numbers", numbers, 2, 98)

    def sample(rng: np.random.Generator) -> tuple[str, str, Row]:
        low = int(rng.integers(1, 100 - numbers + 1))
        high = low + numbers - 1
        hidden = int(rng.integers(low, high + 1))
        letters = "".join(_LETTERS[i] for i in rng.integers(0, 26, size=3))
        row = {"low": low, "high": high, "hidden": hidden, "turns": turns}
        return f"{letters}{low:02}-{high:02}:", f"{hidden:02}", {**row, DEMONSTRATION: _game(rng, row)}

    return Task(
        name="guess",
        prompt_length=9,
        answer_length=3,
        tokenizer=CharTokenizer(f"0123456789-:{_LETTERS}"),
        sample=sample,
        environment=Guessing,
        turns=turns,
        observation_length=1,
    )


def _game(rng: np.random.Generator, row: Row) -> list[str]:
    """A game of uniform guesses in what is left of the range."""
    environment, said, done = Guessing(), list[str](), False
    environment.init(row)
    low, high = row["low"], row["high"]
    while not done:
        number = int(rng.integers(low, high + 1))
        heard, _, done = environment.step(f"{number:02}")
        said += [f"{number:02}", heard]
        low, high = (number + 1, high) if heard == "h" else (low, number - 1)
    return said[:-1]
