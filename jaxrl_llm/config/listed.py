"""The fields and recipes that configs/fields.txt lists, for what must answer before JAX is imported.

`train --help` prints the file. It is written from the declarations by `python -m tests.run.test_settings`.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from jaxrl_llm.config.field_names import unknown_field

_PACKAGE = Path(__file__).parents[1]
# A wheel has the configs inside the package; in a checkout they are beside it.
CONFIGS = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
_FIELDS = CONFIGS / "fields.txt"
# Blocks whose fields a file of the user's own may add to.
_OPEN = ("objective", "task.options", "task.chat_options")


def field_help() -> str:
    """Every field with its default, its choices and its meaning, and the recipes."""
    return _FIELDS.read_text()


def recipes() -> list[str]:
    """The names that `objective.name` may have without a file that registers others."""
    return field_help().rpartition("recipes:")[2].replace(",", " ").split()


def check_names(paths: Iterable[str]) -> None:
    """Raises ValueError for a path `block.field` that is no field of any config."""
    known = sorted(re.findall(r"^  --config\.([\w.]+)=", field_help(), re.MULTILINE))
    blocks = {name.rpartition(".")[0] for name in known}
    for path in paths:
        if path not in known and path not in blocks and path.rpartition(".")[0] not in _OPEN:
            raise ValueError(unknown_field(path, known))
