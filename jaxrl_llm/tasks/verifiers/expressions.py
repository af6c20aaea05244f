"""A tiny parser of whole-number expressions with + - * and parentheses, for text that a model wrote."""

import re

__all__ = ["evaluate"]

_LONGEST = 256  # characters; longer text is no answer to any puzzle here
_DEEPEST = 16  # nested parentheses; bounds the recursion
_TOKEN = re.compile(r"[0-9]+|[-+*()]")


def evaluate(text: str, numbers: list[str]) -> int | None:
    """The value of the expression `text` if it is well formed and uses each of `numbers` exactly once, else None.

        sum := product (('+' | '-') product)*     product := atom ('*' atom)*     atom := number | '(' sum ')'

    There is no division, no sign and no space. Numbers are compared as text before anything is computed, so neither
    leading zeros nor a number of a thousand digits is accepted.
    """
    tokens = _TOKEN.findall(text)
    if len(text) > _LONGEST or "".join(tokens) != text:
        return None
    if sorted(t for t in tokens if t not in "+-*()") != sorted(numbers):
        return None
    try:
        value, rest = _sum(tokens, 0)
    except _Malformed:
        return None
    return None if rest else value


class _Malformed(Exception):
    pass


def _sum(tokens: list[str], depth: int) -> tuple[int, list[str]]:
    value, tokens = _product(tokens, depth)
    while tokens and tokens[0] in "+-":
        right, rest = _product(tokens[1:], depth)
        value, tokens = (value + right if tokens[0] == "+" else value - right), rest
    return value, tokens


def _product(tokens: list[str], depth: int) -> tuple[int, list[str]]:
    value, tokens = _atom(tokens, depth)
    while tokens and tokens[0] == "*":
        right, tokens = _atom(tokens[1:], depth)
        value *= right
    return value, tokens


def _atom(tokens: list[str], depth: int) -> tuple[int, list[str]]:
    if tokens and tokens[0] == "(" and depth < _DEEPEST:
        value, rest = _sum(tokens[1:], depth + 1)
        if rest and rest[0] == ")":
            return value, rest[1:]
    elif tokens and tokens[0].isdigit():
        return int(tokens[0]), tokens[1:]
    raise _Malformed
