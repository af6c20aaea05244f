"""JSON of files that a person or a crash may have changed: whatever is wrong with it is a ValueError with its place."""

import json
import os
from pathlib import Path
from typing import Any


def decoded(content: str | bytes) -> Any:
    """The value of a JSON text in UTF-8, UTF-16 or UTF-32, with or without a byte-order mark; else ValueError."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def json_object(path: str | os.PathLike[str], remedy: str) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        ValueError: it holds something else; the message has the file and the remedy.
        OSError: it cannot be read.
    """
    try:
        value = decoded(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object; {remedy}")
    return value
