"""Files of rows as people have them: JSON Lines, parquet, arrow; one by one, in folders, or named by a data set's place
on the hub."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.ground import hub, hub_names
from jaxrl_llm.ground.json_files import check_encoding, decoded
from jaxrl_llm.tasks import gold_fields
from jaxrl_llm.tasks.base import Draw

_KINDS = (".jsonl", ".parquet", ".arrow")
_ROWS = 1024  # of a table that are in memory at once
_WORDS = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "held out")


def files_of(path: str) -> dict[str, list[Path]]:
    """The files of the splits "train" and "test"; without any of its name one is empty.

    A file is of train. In a folder, names decide, as hubs lay data sets out and `datasets` saves them: `train.jsonl`,
    `data/test-00000-of-00002.parquet`, `train/data-00000-of-00001.arrow`. What is held out under another name
    (validation, dev) is the test split if there is no other; without any such name all files are of train.

    Raises:
        ValueError: there is no file of rows, or a split has files of several data sets.
        FileNotFoundError, ImportError: see `hub.fetched`.
    """
    place = Path(path).expanduser()
    if hub_names.is_name(path):
        place = hub.fetched(path, "dataset", tuple(f"*{kind}" for kind in _KINDS))
    elif not place.is_dir():
        return {"train": [place], "test": []}
    splits: dict[str, list[Path]] = {"train": [], "test": [], "held out": [], "": []}
    for file in sorted(place.rglob("*")):
        cached = file.name.startswith("cache-")  # by `datasets`, beside what it saves
        if file.suffix in _KINDS and not cached:
            splits[_split_of(file.relative_to(place))].append(file)
    named = any(splits[name] for name in ("train", "test", "held out"))
    found = {"train": splits["train"] if named else splits[""], "test": splits["test"] or splits["held out"]}
    if not any(found.values()):
        raise ValueError(f"{path} holds no {', '.join(_KINDS)} file; give a file, or a folder with train.jsonl or such")
    for files in found.values():
        sets = [str(file.relative_to(place)) for file in {(file.parent, file.suffix): file for file in files}.values()]
        if len(sets) > 1:
            raise ValueError(
                f"{path} holds more than one data set: {' and '.join(sets)}; give the folder of one of them"
            )
    return found


def _split_of(file: Path) -> str:
    """The split that a name says, or the folder nearest to it that says one; "" if none does."""
    for part in (file.stem, *(parent.name for parent in file.parents)):
        for word in re.split(r"[\W\d_]+", part.lower()):
            if word in _WORDS:
                return _WORDS[word]
    return ""


def read_draws(file: Path, convert: Callable[[dict[str, Any]], Draw]) -> Iterator[Draw]:
    """The rows of a file, converted; empty lines do not count.

    Raises:
        ValueError: a line is no JSON object or lacks a field, or the file is no table; the message has the file, the
            number of the line or row and its fields.
    """
    rows, read = (_table, _plain) if file.suffix in (".parquet", ".arrow") else (json_lines, json_row)
    for number, given in rows(file):
        try:
            row = read(given)
            draw = convert(dict(row))
            json.dumps(draw, ensure_ascii=False).encode()  # half a surrogate pair is no text
            yield draw
        except KeyError as error:
            known = ", ".join(gold_fields.fields(row))
            raise ValueError(f"{file}:{number} has no field {error}, only {known}; name the right one") from error
        except LookupError as error:
            raise ValueError(f"{file}:{number}: {error}") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}:{number} cannot be read ({error}); correct or remove the line") from error


def json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, line) of the lines that are not empty; raises ValueError for a file that is packed or no UTF-8."""
    with open(file, "rb") as content:
        check_encoding(file, content.read(8))
    with open(file, encoding="utf-8-sig", errors="surrogateescape") as lines:
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def json_row(line: str) -> dict[str, Any]:
    """Return the object that a line holds; raises ValueError or TypeError if it holds none."""
    try:
        line.encode()
    except UnicodeEncodeError as error:  # what is not UTF-8 was read as surrogates
        byte = ord(line[error.start]) & 0xFF
        raise ValueError(f"byte {byte:#04x} at column {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    row = decoded(line)
    if not isinstance(row, dict):
        raise TypeError("it is no JSON object")
    return row


def _table(file: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with open(file, "rb") as opened:
            if file.suffix == ".parquet":
                batches = pyarrow.parquet.ParquetFile(opened).iter_batches(_ROWS)
            elif opened.read(6) == b"ARROW1":  # a file; `datasets` writes streams
                reader = pyarrow.ipc.open_file(opened)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                opened.seek(0)
                batches = pyarrow.ipc.open_stream(opened)
            number = 0
            for batch in batches:
                batch.validate(full=True)
                for row in batch.to_pylist(maps_as_pydicts="lossy"):
                    yield (number := number + 1), row
    except Exception as error:  # of many types; the reader trusts much of what a file says
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
        raise ValueError(f"{file} is no {file.suffix[1:]} file, or is damaged ({said}); write it again") from error


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a table as JSON has it: dates, decimals and bytes of UTF-8 as text, other bytes by their number."""
    return json.loads(json.dumps(row, default=_text))


def _text(value: Any) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        return f"{len(value)} bytes"


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
            raise ValueError(f"{file} cannot be read ({error}); name a readable file") from error
    return hashed.hexdigest()
