"""Checks of numbers and names, for every floor: each message names the field, its value and the remedy."""

import difflib
import math
from collections.abc import Iterable

__all__ = ["Bound", "at_least", "at_least_zero", "in_range", "one_of", "positive", "rule", "suggestion", "within"]

Bound = int | float | None


def rule(least: Bound = None, above: Bound = None, most: Bound = None, below: Bound = None) -> str:
    """The bounds in words: "at least 1", "above 0 and at most 1", "between 0 and 1", "at least 0 and finite"."""
    if least is not None and most is not None:
        return f"between {least} and {most}"
    words = {"at least": least, "above": above, "at most": most, "below": below}
    said = [f"{word} {bound:g}" for word, bound in words.items() if bound is not None and bound != math.inf]
    return " and ".join(said + ["finite"] * (below == math.inf))


def in_range(
    name: str,
    value: object,
    *,
    least: Bound = None,
    above: Bound = None,
    most: Bound = None,
    below: Bound = None,
    meaning: str = "",
) -> None:
    """Raises ValueError unless least <= value, above < value, value <= most and value < below, of those given.

    `meaning` ends the message for a value below `least`: what a special value does ("0 turns it off").
    """
    wanted = rule(least, above, most, below)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{name}={value!r} is not a number; give {name} {wanted}")
    over = (least is None or value >= least) and (above is None or value > above)
    if over and (most is None or value <= most) and (below is None or value < below):
        return
    if (above, most, below) == (None, None, None):
        raise ValueError(f"{name}={value!r} must be {wanted}" + (f"; {meaning}" if meaning else ""))
    raise ValueError(f"{name}={value!r} is out of range; give {name} {wanted}")


def positive(name: str, value: object, *, above: float = 0.0, at_most: Bound = None) -> None:
    """Raises ValueError unless above < value <= at_most."""
    in_range(name, value, above=above, most=at_most)


def at_least_zero(name: str, value: object, *, at_most: Bound = None) -> None:
    """Raises ValueError unless 0 <= value <= at_most; infinity is no coefficient."""
    in_range(name, value, least=0, most=at_most, below=math.inf if at_most is None else None)


def at_least(name: str, value: object, low: int, remedy: str = "") -> None:
    """Raises ValueError unless value >= low; `remedy` says what a special value means ("0 turns it off")."""
    in_range(name, value, least=low, meaning=remedy)


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
