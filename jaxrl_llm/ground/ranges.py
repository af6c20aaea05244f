"""Checks of numbers and names, for every floor: each message names the field, its value and the remedy."""

import difflib
import operator
from collections.abc import Iterable

_LIMITS = {
    "least": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "most": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}


def rule(**limits: int | float) -> str:
    """Limits in words: "at least 1", "above 0 and at most 1", "between 0 and 1", "at least 0 and finite"."""
    if limits.keys() == {"least", "most"}:
        return f"between {limits['least']} and {limits['most']}"
    words = " and ".join(f"{_LIMITS[name][1]} {limit:g}" for name, limit in limits.items())
    return words.replace("below inf", "finite")


def in_range(name: str, value: object, meaning: str = "", /, **limits: int | float) -> None:
    """Raises ValueError unless least <= value, above < value, value <= most and value < below, of those given.

    `meaning` ends the message of a value below `least`: what a special value does ("0 turns it off").
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{name}={value!r} is not a number; give {name} {rule(**limits)}")
    if all(_LIMITS[key][0](value, limit) for key, limit in limits.items()):
        return
    if limits.keys() == {"least"}:
        raise ValueError(f"{name}={value!r} must be {rule(**limits)}" + (f"; {meaning}" if meaning else ""))
    raise ValueError(f"{name}={value!r} is out of range; give {name} {rule(**limits)}")


def within(name: str, value: object, low: int | float, high: int | float) -> None:
    """Raises ValueError unless low <= value <= high."""
    in_range(name, value, least=low, most=high)


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises ValueError unless value is one of the choices."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown{suggestion(value, choices)}; use one of {', '.join(choices)}")


def suggestion(value: object, choices: Iterable[str]) -> str:
    """' (did you mean ...?)' for a near miss, nothing otherwise."""
    close = difflib.get_close_matches(str(value), list(choices), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
