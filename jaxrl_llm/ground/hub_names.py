"""Names of checkpoints and data sets on a hub, OWNER/NAME[/FOLDER][@REVISION], and the commits they stood for."""

import re
from pathlib import Path

NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?P<folder>(/[\w-][\w.-]*)*)(@(?P<revision>[\w-][\w./-]*))?")
_FILES = (".gguf", ".safetensors", ".jsonl", ".json", ".parquet", ".arrow")  # a path that ends so is that of a file
REVISIONS: dict[str, str] = {}  # {name: commit} of everything that this process has fetched


def is_name(text: str) -> bool:
    """Return whether this names something on the hub: it has the form, and neither it nor its first part is a path."""
    here = Path(text).exists() or Path(text.partition("/")[0]).exists()
    return bool(NAME.fullmatch(text)) and not text.endswith(_FILES) and not here
