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
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object; {remedy}")
    return value


def check_encoding(path: str | os.PathLike[str], head: bytes) -> None:
    """Raises ValueError, with the remedy, if the first bytes of a text file are not those of UTF-8 text."""
    known = {b"\x1f\x8b": ("gzip", "unpack it first"), b"\xfd7zXZ": ("xz", "unpack it first")}
    known |= {b"(\xb5/\xfd": ("zstd", "unpack it first"), b"PK\x03\x04": ("zip", "unpack it first")}
    known |= dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), ("UTF-16", "save it as UTF-8"))
    for start, (name, remedy) in known.items():
        if head.startswith(start):
            raise ValueError(f"{path} is {name} and not UTF-8 text; {remedy}")
