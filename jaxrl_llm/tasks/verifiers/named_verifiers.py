"""Verifiers of text by name: `exact`, `numeric`, `math`, or a user's function.

Each takes (prompt, answer, gold, row) and returns a reward; it is an object that a worker process can unpickle.
"""

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import logging
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

from jaxrl_llm.config.loading import one_line
from jaxrl_llm.ground.ranges import suggestion

_READ = 4096  # characters of an answer that `numeric` reads, counted from its end


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


def own_answer(verify: Any, gold: str) -> str | None:
    """The right answer in the form that a verifier by name must find right, if it can read it; None for other rules.

    A rule of the user's own may ask for more than the right answer, a tag around it for example.
    """
    if isinstance(verify, MathVerifier):
        return _as_mathematics(gold)
    return gold if verify in (exact, numeric) else None


def exact(prompt: str, answer: str, gold: str, row: Mapping[str, Any]) -> float:
    """1 if the answer is the right one, apart from spaces around it."""
    return float(answer.strip() == gold.strip())


def numeric(prompt: str, answer: str, gold: str, row: Mapping[str, Any]) -> float:
    """1 if the number that the answer ends with is that of the right answer, as fractions: see `number`."""
    given, right = number(answer), number(gold)
    return float(right is not None and given == right)


# Digits with or without groups of three, a decimal part, a power of ten: every repetition is bounded, and what can
# start a match cannot also continue one, so that hostile text costs no more than its length.
_DIGITS = r"\d{1,40}(?!\d)"
_DECIMAL = (
    rf"(?:\d{{1,3}}(?:,\d{{3}}){{1,12}}(?!\d)|{_DIGITS})(?:\.{_DIGITS})?(?:[eE][-+]?\d{{1,2}}(?!\d))?|\.{_DIGITS}"
)
_BRACES = r"\s{0,3}(?:\{\s{0,3}(?P<%s>\d{1,40})\s{0,3}\}|(?P<%s>\d))"
_TEX_FRACTION = r"\\[dt]?frac" + _BRACES % ("top", "top1") + _BRACES % ("bottom", "bottom1")
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)}}\].])[-+])?(?:\\?[$€£¥]\s?)?(?<![\d.])"
    rf"(?:(?:(?P<whole>{_DIGITS})\s{{0,2}})?{_TEX_FRACTION}"
    rf"|(?P<mixed>{_DIGITS})\s(?P<over>{_DIGITS})/(?P<under>{_DIGITS})"
    rf"|(?P<left>{_DECIMAL})(?:\s?/\s?(?P<right>{_DIGITS}))?)",
    re.ASCII,
)
_SPELLINGS = str.maketrans({"−": "-", "–": "-", "⁄": "/", "\u00a0": " ", "\u202f": " ", "\u2009": " "})


def number(text: str) -> Fraction | None:
    """The number that a text answers with, or None.

    It is the last number of the content of the last `\\boxed{}`; else the first number after the last `####`; else
    the last number of the text. Thousands may be grouped by commas; `3/4`, `1 3/4`, `\\frac{3}{4}`, decimals and
    powers of ten are read exactly; currency signs, units and `%` are ignored (50 % is 50).
    """
    text = text[-_READ:].translate(_SPELLINGS)
    for grouping in ("{,}", r"\,", r"\!"):
        text = text.replace(grouping, "," if grouping == "{,}" else "")
    boxed = _boxed(text)
    if boxed is not None:
        return _last(boxed)
    _, marked, after = text.rpartition("####")
    if marked:
        first = _NUMBER.search(after)
        return None if first is None else _value(first)
    return _last(text)


def _last(text: str) -> Fraction | None:
    matches = list(_NUMBER.finditer(text))
    return _value(matches[-1]) if matches else None


def _boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds; an unbalanced one holds all that follows."""
    _, opening, rest = text.rpartition(r"\boxed{")
    if not opening:
        return None
    depth = 1
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if not depth:
            return rest[:i]
    return rest


def _value(match: re.Match[str]) -> Fraction | None:
    part = match.groupdict()
    try:
        if top := part["top"] or part["top1"]:
            value = Fraction(int(top), int(part["bottom"] or part["bottom1"])) + int(part["whole"] or 0)
        elif part["mixed"]:
            value = int(part["mixed"]) + Fraction(int(part["over"]), int(part["under"]))
        else:
            value = Fraction(part["left"].replace(",", "")) / int(part["right"] or 1)
    except ZeroDivisionError:
        return None
    return -value if (part["sign"] or "").startswith("-") else value


def _as_mathematics(text: str) -> str:
    """The text as math-verify sees that it is mathematics."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"


@dataclasses.dataclass(frozen=True)
class MathVerifier:
    """1 if math-verify finds the answer equal to the right one: LaTeX, sets, intervals, expressions, units."""

    def load(self) -> None:
        import math_verify

        # It says at each call that its own limits are off. They raise in threads; the worker's limit kills.
        logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)

    def __call__(self, prompt: str, answer: str, gold: str, row: Mapping[str, Any]) -> float:
        from math_verify import parse, verify

        right = parse(_as_mathematics(gold), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        given = parse(answer, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        return float(verify(right, given, timeout_seconds=None))


@dataclasses.dataclass(frozen=True)
class UserVerifier:
    """A function of (prompt, answer, gold, row) named by its place: "package.module:function" or "file.py:function"."""

    spec: str

    def load(self) -> None:
        """Import it, so that a mistake shows at the start."""
        _function(self.spec)

    def __call__(self, prompt: str, answer: str, gold: str, row: Mapping[str, Any]) -> float:
        return _function(self.spec)(prompt, answer, gold, row)


def code_files(spec: str) -> list[Path]:
    """The files that `verifier` of this text would run, found without running any; none if it names no function."""
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        return []
    if place.endswith(".py"):
        return [Path(place)]
    files, inside = [], None
    for module in itertools.accumulate(place.split("."), "{}.{}".format):  # a package runs before its modules
        found = next(filter(None, (finder.find_spec(module, inside) for finder in sys.meta_path)), None)
        if found is None:
            break
        files += [Path(found.origin)] if found.origin is not None else []
        inside = found.submodule_search_locations
        if inside is None:
            break
    return files


@functools.cache
def _function(spec: str) -> Callable[..., float]:
    place, _, name = spec.rpartition(":")
    if not name.isidentifier():
        raise ValueError(f"verifier={spec!r} names no function; write package.module:function or file.py:function")
    try:
        if place.endswith(".py"):
            module_spec = importlib.util.spec_from_file_location(f"verifier_{Path(place).stem}", place)
            assert module_spec is not None
            assert module_spec.loader is not None
            module = importlib.util.module_from_spec(module_spec)
            sys.modules[module_spec.name] = module
            with one_line(Path(place)):
                module_spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except (Exception, SystemExit) as error:  # of the user's own code
        kind = "" if isinstance(error, ValueError | ImportError | OSError) else f"{type(error).__name__}: "
        raise ValueError(
            f"verifier={spec!r} cannot be imported ({kind}{error}); correct it, or name a module or an existing file"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(
            f"verifier={spec!r}: {place} has no function {name!r}; name one of (prompt, answer, gold, row)"
        )
    return cast(Callable[..., float], function)
