"""Right answers in a row of the data: where they stand, and what forms they have."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.ground.json_files import decoded
from jaxrl_llm.tasks import messages
from jaxrl_llm.tasks.golds import NOTHING


def at(row: Mapping[str, Any], field: str) -> Any:
    """The value of a field; `reward_model.ground_truth` and `choices.0.text` lie in objects, lists, or JSON text.

    Raises:
        KeyError: there is no such field.
    """
    if field in row:
        return row[field]
    value: Any = row
    try:
        for part in field.split("."):
            value = decoded(value) if isinstance(value, str) else value
            value = value[int(part)] if isinstance(value, list) else value[part]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise KeyError(field) from error
    return value


def fields(value: Any, before: str = "") -> Iterator[str]:
    """The names by which `at` finds what an object holds."""
    for name, inner in value.items():
        yield from fields(inner, f"{before}{name}.") if isinstance(inner, dict) else (before + name,)


def texts(field: str, value: Any, verifier: str) -> list[str]:
    """The right answers that a field holds: a text, a number as its digits, the assistant's last message, or a list of
    which any is right.

    An object, or a list of objects, is one right answer, as JSON, for a verifier of the user's own.

    Raises:
        LookupError: it holds an object (for `numeric` and `math` also one in JSON text), and the verifier has a name.
    """
    if verifier in ("numeric", "math") and isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            value = decoded(value)
    listed = value if isinstance(value, list) else [value]
    if isinstance(value, list) and value and isinstance(value[-1], dict) and value[-1].get("role") == "assistant":
        return [messages.message(field, value[-1])["content"]]
    if nested := [one for one in listed if isinstance(one, dict | list)]:
        if ":" in verifier:
            return [json.dumps(value)]
        start = field if isinstance(value, dict) else f"{field}.0"
        named = fields(nested[0], f"{start}.") if isinstance(nested[0], dict) else [start]
        raise LookupError(f"field {field!r} holds an object, not an answer; name a field in it: {' or '.join(named)}")
    spelled = dict.fromkeys(text for one in listed for text in _spelled(one))
    return [text for text in spelled if text.strip() not in NOTHING] or [*spelled, ""][:1]


def _spelled(value: Any) -> tuple[str, ...]:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:  # pandas makes floats of whole numbers
        value = int(value)
    written = value if isinstance(value, str) else json.dumps(value)
    return (written, str(value)) if isinstance(value, bool) else (written,)
