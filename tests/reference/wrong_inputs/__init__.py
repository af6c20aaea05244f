"""Wrong inputs that people make, each from a valid one, and what the real commands say to them.

    python -m tests.reference.wrong_inputs [--only WORD ...] [--all]

A kind is a row of a table: what is wrong, the command line, the files that are changed, and what has to be said. It is
right if the command ends in one line that says so (`line`), goes on with a warning of that name (`warning`), or does
what was asked where the oddity is harmless (`runs`).
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The content of a file, None if it is missing, or a function that changes what is at its path.
Change = str | bytes | None | Callable[[Path], Any]


@dataclass(frozen=True)
class Kind:
    """One wrong input."""

    group: str  # of the table that is printed
    what: str  # what is wrong, in words
    line: str  # as typed after `jaxrl-llm`
    says: str = ""  # what the one line, or the warning, has to name
    files: Mapping[str, Change] = field(default_factory=dict)
    expects: str = "line"  # line | warning | runs
    code: int = 2  # of `line`: 1 if the run had started
    environment: Mapping[str, str] = field(default_factory=dict)
    most_bytes: int = 0  # no file may grow beyond: a write fails as on a full disk
    alone: bool = False  # in a fresh process, which imports what the command imports and no more


def kinds(group: str, line: str, rows: Iterable[tuple[Any, ...]], **same: Any) -> list[Kind]:
    """Kinds from (what is wrong, what follows the line, what has to be said[, {file: change}[, other fields]])."""
    made = []
    for what, more, says, *rest in rows:
        files, own = ({}, {}, *rest)[-2:] if len(rest) != 1 else (rest[0], {})
        made.append(Kind(group, what, f"{line} {more}".strip(), says, files, **same | own))
    return made


def changed(edit: Callable[[bytes], bytes]) -> Change:
    """The file with its content changed."""
    return lambda path: path.write_bytes(edit(path.read_bytes()))


def cut(path: Path) -> None:
    """The first half of the file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def json_with(**values: Any) -> Change:
    """The JSON object with these values."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | values))


def mode(bits: int) -> Change:
    """Other permissions of the file or folder."""
    return lambda path: os.chmod(path, bits)


def rows_of(*rows: Any) -> str:
    """JSON Lines."""
    return "".join(f"{json.dumps(row)}\n" for row in rows)


# A run of one short step where nothing is wrong; what follows on the line counts.
TINY = (
    "--config.steps=1 --config.warm_start.steps=0 --config.rollout.prompts=4 --config.rollout.group_size=4 "
    "--config.updates.minibatches=2 --config.evaluation.prompts=4 --config.evaluation.samples=1"
)
TRAIN = f"train --config=grpo:smoke --workdir=new {TINY}"
