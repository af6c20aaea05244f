"""Addition and subtraction of whole numbers: '58+67=' -> '521' (reversed) or '125'."""

import operator
from collections.abc import Callable

import numpy as np

from jaxrl_llm.ground.ranges import within
from jaxrl_llm.tasks.base import Row, Task
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import CharTokenizer
from jaxrl_llm.tasks.verifiers import numeric


def addition(*, digits: int = 3, reverse: bool = True, strict: bool = True, spaced: bool = False) -> Task:
    """Add two numbers of at most `digits` digits; there are 100**digits prompts.

    Args:
        reverse: write the answer with its least significant digit first, the order in which carries are worked out.
        strict: the answer is the whole text; otherwise its last number counts, as a chat model writes it.
        spaced: the prompt has spaces between numbers and signs, as in most text: '58 + 67 ='.
    """
    return _two_operands("addition", "+", operator.add, digits, reverse, strict, spaced)


def subtraction(*, digits: int = 3, reverse: bool = True, strict: bool = True, spaced: bool = False) -> Task:
    """Subtract two numbers; a negative answer starts with '-', reversed or not. Arguments as for `addition`."""
    return _two_operands("subtraction", "-", operator.sub, digits, reverse, strict, spaced)


def _two_operands(
    name: str, sign: str, apply: Callable[[int, int], int], digits: int, reverse: bool, strict: bool, spaced: bool
) -> Task:
    within(f"{name}.digits", digits, 1, 18)
    if reverse and not strict:
        raise ValueError(f"{name}.strict=False reads numbers as they are written; set {name}.reverse=False")

    space = " " if spaced else ""

    def solve(left: int, right: int) -> str:
        value = apply(left, right)
        magnitude = str(abs(value))
        return ("-" if value < 0 else "") + (magnitude[::-1] if reverse else magnitude)

    def sample(rng: np.random.Generator) -> tuple[str, str]:
        left, right = map(int, rng.integers(0, 10**digits, size=2))
        return f"{left}{space}{sign}{space}{right}{space}=", solve(left, right)

    def verify(prompt: str, answer: str, gold: str, row: Row) -> float:
        if not strict:
            return numeric(prompt, answer, gold, row)
        left, right = prompt.removesuffix("=").split(sign)
        return float(answer == solve(int(left), int(right)))

    return Task(
        name=name,
        prompt_length=2 * digits + 2 + 3 * len(space),
        answer_length=digits + 2,  # a carry or a sign, and EOS
        tokenizer=CharTokenizer(f"0123456789{sign}={space}"),
        sample=sample,
        verify=verify,
    )
