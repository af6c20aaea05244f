"""Code lines of the package that a run loads, and those that it could reach, by room.

    python -m tests.reference.loaded [--config grpo:smoke] [--config.block.field=value ...]

A code line is a line with a token that is neither a comment nor part of a docstring. *Loaded* are the files that a run
of one step has imported at its end. *Reachable* are those that any chain of imports leads to from `jaxrl_llm.main`,
with imports inside functions and the places of `ByName` tables, so that late imports cannot hide growth.
"""

import collections
import io
import sys
import tempfile
import tokenize

from tests.test_floors import PACKAGE, graph, sources

_SILENT = (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE, tokenize.NL)


def code_lines(source: str) -> int:
    """Lines of a source that hold code: no comments, docstrings or blanks."""
    held, statement_begins = set(), True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _SILENT:
            statement_begins = True
        elif token.type == tokenize.STRING and statement_begins and token.line.strip().startswith(('"""', 'r"""')):
            statement_begins = False
        elif token.type not in (tokenize.COMMENT, tokenize.ENDMARKER):
            held.update(range(token.start[0], token.end[0] + 1))
            statement_begins = False
    return len(held)


def reachable(start: str = "main") -> set[str]:
    """The files of the package that imports lead to from `start`, as "room.file"."""
    arrows = graph(sources())
    arrows = {file: {*others, *_rooms(file)} for file, others in arrows.items()}
    found, open_ends = set(), [start]
    while open_ends:
        file = open_ends.pop()
        if file in arrows and file not in found:
            found.add(file)
            open_ends += arrows[file]
    return found


def _rooms(file: str) -> list[str]:
    """The folders of a file, whose `__init__` is imported with it."""
    parts = file.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def loaded(config: str, fields: dict[str, str]) -> set[str]:
    """The files of the package that this process has imported after a run of one step."""
    import jaxrl_llm

    with tempfile.TemporaryDirectory() as folder:
        jaxrl_llm.train(config, folder, {"steps": 1, "warm_start.steps": 1, "evaluation.every": 1} | fields)
    names = [name for name in sys.modules if name.startswith("jaxrl_llm.")]
    return {name.removeprefix("jaxrl_llm.") for name in names} & set(sources())


def table(kinds: dict[str, set[str]]) -> str:
    """Code lines by room, a column for each set of files."""
    lines = {file: code_lines(source) for file, source in sources().items()}
    columns = {kind: collections.Counter() for kind in kinds}
    for kind, files in kinds.items():
        for file in files:
            room = file.partition(".")[0]
            columns[kind][room if (PACKAGE / room).is_dir() else "commands"] += lines[file]
    rooms = sorted({room for column in columns.values() for room in column})
    rows = [("", *kinds), *((room, *(column[room] for column in columns.values())) for room in rooms)]
    rows.append(("all", *(column.total() for column in columns.values())))
    return "\n".join(f"{row[0]:12}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows)


if __name__ == "__main__":
    config, fields = "grpo:smoke", {}
    for argument in sys.argv[1:]:
        name, _, value = argument.removeprefix("--").removeprefix("config.").partition("=")
        config, fields = (value, fields) if name == "config" else (config, fields | {name: value})
    files = set(sources())
    print(table({"package": files, "reachable": reachable(), "loaded": loaded(config, fields)}))
