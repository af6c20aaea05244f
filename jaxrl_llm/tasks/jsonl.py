"""Questions and answers from a JSON Lines file."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.ground.json_files import check_encoding, decoded
from jaxrl_llm.tasks.base import Draw, Source, Task, register
from jaxrl_llm.tasks.splits import is_test
from jaxrl_llm.tasks.tokenizers import ByteTokenizer
from jaxrl_llm.tasks.verifiers import verifier as named_verifier


@register
def jsonl(
    *,
    path: str = "",
    test_path: str = "",
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    verifier: str = "exact",
    prompt_length: int = 256,
    answer_length: int = 256,
    time_limit: float = 5.0,
) -> Task:
    """One JSON object a line, with a prompt, its right answer, and whatever else the verifier reads as `row`.

    Without `test_path`, one prompt in eight of `path` is of the test split, by a hash of its text. An answer that is a
    number is read as its digits.
    """
    if not path:
        raise ValueError("jsonl.path is empty; set task.options.path to a file with one JSON object a line")

    files = [Path(file) for file in (path, test_path) if file]

    def read() -> Mapping[str, Iterator[Draw]]:
        if test_path:
            return {"train": read_draws(files[0], convert), "test": read_draws(files[1], convert)}
        return {
            "train": (draw for draw in read_draws(files[0], convert) if not is_test(draw[0])),
            "test": (draw for draw in read_draws(files[0], convert) if is_test(draw[0])),
        }

    def convert(row: dict) -> Draw:
        prompt, answer = row.pop(prompt_field), row.pop(answer_field)
        if not isinstance(prompt, str):
            raise TypeError(f"field {prompt_field!r} must be text, not {type(prompt).__name__}")
        return prompt, answer if isinstance(answer, str) else json.dumps(answer), row

    source = Source(read, lambda: digest(*files))
    return task_of_files("jsonl", source, verifier, prompt_length, answer_length, time_limit)


def task_of_files(
    name: str, source: Source, verifier: str, prompt_length: int, answer_length: int, time_limit: float
) -> Task:
    """A task of text with the verifier of that name; its splits are as large as the files."""
    verify, isolated = named_verifier(verifier)
    return Task(
        name=name,
        prompt_length=prompt_length,
        answer_length=answer_length,
        tokenizer=ByteTokenizer(),
        verify=verify,
        isolated=isolated,
        time_limit=time_limit,
        source=source,
        train_size=0,
        test_size=0,
    )


def read_draws(file: Path, convert: Callable[[dict[str, Any]], Draw]) -> Iterator[Draw]:
    """The rows of a file, converted; empty lines do not count.

    Raises:
        ValueError: a line is no JSON object or lacks a field; the message has the file, the line and its fields.
    """
    with open(file, encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                _check_utf8(line)
                row = decoded(line)
                if not isinstance(row, dict):
                    raise TypeError("it is no JSON object")
                fields = ", ".join(row)
                draw = convert(row)
                json.dumps(draw, ensure_ascii=False).encode()  # half a surrogate pair is no text
                yield draw
            except KeyError as error:
                raise ValueError(f"{file}:{number} has no field {error}, only {fields}; name the right one") from error
            except (TypeError, ValueError) as error:
                raise ValueError(f"{file}:{number} cannot be read ({error}); correct or remove the line") from error


def _check_utf8(line: str) -> None:
    try:
        line.encode()
    except UnicodeEncodeError as error:  # what is not UTF-8 was read as surrogates
        byte = ord(line[error.start]) & 0xFF
        raise ValueError(f"byte {byte:#04x} at column {error.start + 1} is not UTF-8; save the file as UTF-8") from None


def digest(*files: Path) -> str:
    """A digest of the content of the files; one that cannot be read is a ValueError."""
    hashed = hashlib.sha256()
    for file in files:
        try:
            with open(file, "rb") as content:
                check_encoding(file, content.read(8))
                content.seek(0)
                hashed.update(hashlib.file_digest(content, "sha256").digest())
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error}); name a readable JSON Lines file") from error
    return hashed.hexdigest()
