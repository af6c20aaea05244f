"""Checks of fields, for every floor: each message names the field, its value and the remedy."""

import difflib
import math
from collections.abc import Iterable


def _number(name: str, value: object, rule: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{name}={value!r} is not a number; give {name} {rule}")
    return float(value)


def positive(name: str, value: object, *, above: float = 0.0, at_most: float = math.inf) -> None:
    """Raises ValueError unless above < value <= at_most."""
    rule = f"above {above:g}" + ("" if at_most == math.inf else f" and at most {at_most:g}")
    number = _number(name, value, rule)
    if not above < number <= at_most:
        raise ValueError(f"{name}={value!r} is out of range; give {name} {rule}")


def at_least_zero(name: str, value: object, *, at_most: float = math.inf) -> None:
    """Raises ValueError unless 0 <= value <= at_most; infinity is no coefficient."""
    rule = "at least 0 and finite" if at_most == math.inf else f"between 0 and {at_most:g}"
    number = _number(name, value, rule)
    if not 0.0 <= number <= at_most or math.isinf(number):
        raise ValueError(f"{name}={value!r} is out of range; give {name} {rule}")


def at_least(name: str, value: object, low: int, remedy: str = "") -> None:
    """Raises ValueError unless value >= low; `remedy` says what a special value means ("0 turns it off")."""
    if _number(name, value, f"at least {low}") < low:
        raise ValueError(f"{name}={value!r} must be at least {low}" + (f"; {remedy}" if remedy else ""))


def within(name: str, value: object, low: int | float, high: int | float) -> None:
    """Raises ValueError unless low <= value <= high."""
    rule = f"a value in {low}..{high}"
    if not low <= _number(name, value, rule) <= high:
        raise ValueError(f"{name}={value!r} is out of range; give {name} {rule}")


def fraction(name: str, value: object, remedy: str = "") -> None:
    """Raises ValueError unless 0 <= value < 1; `remedy` says what a special value means."""
    if not 0 <= _number(name, value, "at least 0 and below 1") < 1:
        raise ValueError(f"{name}={value!r} must be at least 0 and below 1" + (f"; {remedy}" if remedy else ""))


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises ValueError unless value is one of the choices."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown{suggestion(value, choices)}; use one of {', '.join(choices)}")


def suggestion(value: object, choices: Iterable[str]) -> str:
    """' (did you mean ...?)' for a near miss, nothing otherwise."""
    close = difflib.get_close_matches(str(value), list(choices), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
