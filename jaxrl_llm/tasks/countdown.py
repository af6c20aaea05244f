"""Countdown: reach a target with the given numbers: '3,7,12:43=' -> '12*3+7', or '7+3*12', or any other way."""

import ast
import re

import numpy as np

from jaxrl_llm.ground.ranges import within
from jaxrl_llm.tasks.base import Row, Task
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import CharTokenizer

_LONGEST = 256  # characters; longer text is no answer to any puzzle here
_TOKEN = re.compile(r"[0-9]+|[-+*()]")
_ALLOWED = (ast.Expression, ast.BinOp, ast.Constant, ast.Add, ast.Sub, ast.Mult)
_BINDING = {"+": 1, "-": 1, "*": 2, "": 3}  # "" is a single number


def countdown(*, numbers: int = 3, maximum: int = 30, target_maximum: int = 99) -> Task:
    """Write an expression of + - * and parentheses that uses every given number once and equals the target.

    The numbers of a prompt, 1 to `maximum`, are sorted, so that two prompts are never the same puzzle in another order.
    """
    within("countdown.numbers", numbers, 2, 6)
    within("countdown.maximum", maximum, 2, 999)
    within("countdown.target_maximum", target_maximum, 10, 9999)

    def sample(rng: np.random.Generator) -> tuple[str, str]:
        while True:
            given = [int(n) for n in rng.integers(1, maximum + 1, size=numbers)]
            value, solution = _random_expression(rng, given)
            if 1 <= value <= target_maximum:
                return f"{','.join(map(str, sorted(given)))}:{value}=", solution

    def verify(prompt: str, answer: str, gold: str, row: Row) -> float:
        given, target = prompt.removesuffix("=").split(":")
        return float(evaluate(answer, given.split(",")) == int(target))

    width = len(str(maximum))
    return Task(
        name="countdown",
        prompt_length=numbers * (width + 1) + len(str(target_maximum)) + 1,
        answer_length=numbers * (width + 1) + 2 * (numbers - 2),  # numbers, signs, parentheses, EOS
        tokenizer=CharTokenizer("0123456789+-*(),:="),
        sample=sample,
        verify=verify,
    )


def _random_expression(rng: np.random.Generator, given: list[int]) -> tuple[int, str]:
    """Joins two parts at random until one is left; parentheses only where they are needed."""
    parts = [(n, str(n), "") for n in given]  # value, text, outermost sign
    while len(parts) > 1:
        left = parts.pop(int(rng.integers(len(parts))))
        right = parts.pop(int(rng.integers(len(parts))))
        sign = "+-*"[int(rng.integers(3))]
        value = {"+": left[0] + right[0], "-": left[0] - right[0], "*": left[0] * right[0]}[sign]
        open_left = _BINDING[left[2]] < _BINDING[sign]
        open_right = _BINDING[right[2]] < _BINDING[sign] or (sign == "-" and _BINDING[right[2]] == 1)
        first = f"({left[1]})" if open_left else left[1]
        second = f"({right[1]})" if open_right else right[1]
        parts.append((value, f"{first}{sign}{second}", sign))
    return parts[0][0], parts[0][1]


def evaluate(text: str, numbers: list[str]) -> int | None:
    """Return the value of a sum of products of `numbers`, each used exactly once, in Python's grammar; else None.

    There is no division, no sign, no power and no space. Numbers are compared as text before anything is computed, so
    neither leading zeros nor a number of a thousand digits is accepted.
    """
    tokens = _TOKEN.findall(text)
    if len(text) > _LONGEST or "".join(tokens) != text:
        return None
    if sorted(token for token in tokens if token.isdigit()) != sorted(numbers):
        return None
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return None
    if not all(isinstance(node, _ALLOWED) for node in ast.walk(tree)):
        return None
    return eval(compile(tree, "answer", "eval"))
