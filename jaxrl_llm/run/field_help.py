"""The --help that lists every field of a config."""

import re
import textwrap
from typing import Any

from jaxrl_llm import objectives
from jaxrl_llm.config import loading

_WIDTH = 80


def field_help() -> str:
    """Every field with its default and its comment in configs/base.py, at most 80 columns wide."""
    source = (loading.CONFIGS / "base.py").read_text()
    order = re.findall(r"^ +config\.([\w.]+) = ", source, re.MULTILINE)
    comments = dict(re.findall(r"^ +config\.([\w.]+) = .*?  # (.*)$", source, re.MULTILINE))

    comments |= {f"objective.{name}": declared.meaning for name, declared in objectives.fields().items()}

    blocks = list(dict.fromkeys(name.partition(".")[0] if "." in name else "" for name in order))

    def place(item: tuple[str, Any]) -> tuple[int, int, int]:
        """By block; inside one the fields as in the file, then those of the blocks inside it."""
        block, dot, _ = field = item[0].partition(".")
        name = "".join(field)
        while name not in order:
            name = name.rpartition(".")[0]
        return blocks.index(block if dot else ""), item[0].count("."), order.index(name)

    lines = ["fields, their defaults and what they mean; a config changes some of them:"]
    block = None
    for field, value in sorted(loading.flat(loading.load(loading.find("base"))).items(), key=place):
        if field.rpartition(".")[0] != block:
            block = field.rpartition(".")[0]
            lines += ["", *_wrapped(f"{block}: {comments[block]}" if block in comments else block)] if block else [""]
        comment = f"  {comments[field]}" if field in comments else ""
        lines += _wrapped(f"  --config.{field}={value}{comment}")
    return "\n".join(lines)


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, _WIDTH, subsequent_indent=" " * 6, break_on_hyphens=False)
