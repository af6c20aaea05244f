"""Equality of formulas: as text, as words, else as math-verify finds it, without the false rewards known of it."""

import re
from typing import Any

from jaxrl_llm.tasks.verifiers.answer_grammar import ascii_of, plain

_LONGEST = 400  # characters of a formula
# 3:30, 1:2, 101_2, 1, 2, ..., n: only as text, since math-verify reads a number in them.
_NO_VALUE = re.compile(r"\d ?:|\d \d|\.\.\.|\\[lc]?dots|\d_|\\(?:forall|exists)")
_ENDLESS = re.compile(r"\^[^\w\\]*\d{5}|\d\s*\^[^\w\\]*\d+\s*\^|\d{5}\s*!|!\s*!")  # what sympy would not finish
_OPENING = re.compile(r"[(\[]|\\\{")  # a point, an interval, a set: math-verify compares their elements
_CHOICE = re.compile(r"\(([A-Z])\)(?: .*)?|([A-Z])[).:]?")
_REWRITTEN = [
    (r"\\math(?:rm|bf|it|sf)\s*\{\s*(\w)\s*\}", r"\1"),
    (r"(?<![\\A-Za-z])sqrt(?![A-Za-z])", r"\\sqrt"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b", ","),
    (r"\$|\\[()\[\]]|\.\s*$", ""),
    (r"\s+", " "),
]


def same_formula(given: str, right: str) -> bool:
    """Return whether an answer is the right one; False for a formula that nobody would finish to evaluate."""
    texts = [re.sub(r"(?<!\.)\.$", "", plain(text).strip(" $")) for text in (given, right)]
    one, other = (re.sub(r"(?<!\d)\s|\s(?!\d)|\$", "", text) for text in texts)
    if one == other or not one or not other:
        return bool(one)
    choices = [match[1] or match[2] for text in texts if (match := _CHOICE.fullmatch(text))]
    if len(choices) == 2:
        return choices[0] == choices[1]
    if any(map(_is_words, texts)):
        return len(one) > 1 and one.casefold() == other.casefold()
    opening = [match[0] for text in texts if (match := _OPENING.match(text))]
    if len(set(opening)) == 2:
        return False
    if any(map(_NO_VALUE.search, texts)) or max(map(len, texts)) > _LONGEST or any(map(_ENDLESS.search, texts)):
        return False
    return _verified(_parsed(right), _parsed(given))


def _is_words(text: str) -> bool:
    """Letters that are no product of variables, which math-verify would multiply: `no` would equal `on`."""
    return bool(re.fullmatch(r"[A-Za-z]|(?=.*[aeiouAEIOU ])[A-Za-z\s'-]*", text))


def _parsed(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    latex = ascii_of(text)
    for pattern, replacement in _REWRITTEN:
        latex = re.sub(pattern, replacement, latex)
    # What cannot be parsed has no value, rather than that of a number in it.
    return parse(
        f"${latex.strip()}$",
        [LatexExtractionConfig()],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )


def _verified(right: list[Any], given: list[Any]) -> bool:
    from math_verify import verify

    return bool(right and given) and verify(right, given, timeout_seconds=None) and _same_size(right[0], given[0])


def _same_size(right: Any, given: Any) -> bool:
    """math-verify rounds small numbers to 0, so that 1/2^98 would equal 1/2^99; their quotient is not 1."""
    import sympy

    if type(right) is type(given) and isinstance(right, sympy.Set | sympy.Tuple):
        return all(any(_same_size(one, other) for other in given.args) for one in right.args)
    if not (isinstance(right, sympy.Expr) and isinstance(given, sympy.Expr)):
        return True
    symbols = sorted(right.free_symbols | given.free_symbols, key=str)
    point: Any = {symbol: sympy.Rational(97 + 10 * i, 89) for i, symbol in enumerate(symbols)}
    right, given = (sympy.N(side.subs(point).doit(), 30) for side in (right, given))
    return right == given or bool(right != 0 and abs(complex(sympy.N(given / right)) - 1) < 1e-6)
