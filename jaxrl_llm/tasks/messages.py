"""Prompts that are conversations: what is asked last, what was said before it, and the answer if it is there."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

EARLIER = "earlier_messages"  # the field of an example's row that holds what was said before its prompt
GIVEN = "given_to_init"  # the field of a row whose prompt an environment has replaced: what its `init` was given

Message = Mapping[str, str]


def split(field: str, given: Sequence[Any]) -> tuple[str, list[Message], str | None]:
    """(what the user says last, the messages before it, the assistant's answer to it or None).

    Raises:
        TypeError: `given` is no list of {"role": text, "content": text}.
        ValueError: it does not end with a message of the user, before the answer.
    """
    said = [message(field, one) for one in given]
    answer = said.pop()["content"] if said and said[-1]["role"] == "assistant" else None
    if not said or said[-1]["role"] != "user":
        raise ValueError(f"field {field!r}: the last message, before any answer, must be one of the user")
    return said[-1]["content"], said[:-1], answer


def whole(prompt: str, row: Mapping[str, Any]) -> str:
    """A text that is the same for the same question after the same messages."""
    return json.dumps([*row[EARLIER], prompt]) if EARLIER in row else prompt


def message(field: str, one: Any) -> Message:
    """A message of a role and a text; anything else is a TypeError."""
    if not isinstance(one, dict) or not all(isinstance(one.get(key), str) for key in ("role", "content")):
        raise TypeError(f'field {field!r} holds {one!r:.60}, no message {{"role": "...", "content": "..."}} of text')
    return {"role": one["role"], "content": one["content"]}
