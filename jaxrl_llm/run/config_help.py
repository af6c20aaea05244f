"""The part of `--help` on one config."""

import dataclasses
import textwrap
from typing import Any

from jaxrl_llm import objectives
from jaxrl_llm.config import loading
from jaxrl_llm.run.fields import declared_fields


def config_help(name: str) -> str:
    """Return what the config `name` sets otherwise than configs/base.py, with fields of its own, and its variants.

    Raises:
        ValueError, FileNotFoundError: as `loading.load` and `loading.find`.
    """
    usual = loading.flat(loading.load(loading.find("base")))  # first: the file may register what adds fields to it
    source = loading.find(name)
    config: Any = loading.load(source)
    known, recipe = declared_fields(), objectives.hyperparameters(config.objective.name)
    lines: list[str] = []
    for field, value in loading.flat(config).items():
        if field not in usual or value != usual[field]:
            block, _, key = field.rpartition(".")
            shown = recipe.get(key) if value is None and block == "objective" else value
            lines += _wrapped(f"  --config.{field}={shown}  {known[field].comment if field in known else ''}".rstrip())
    head = f"what {name} sets otherwise, and fields of its own:\n" if lines else f"{name} sets no field otherwise"
    try:
        loading.load(dataclasses.replace(source, variant="?"))
    except ValueError as error:  # most name those that there are
        if "unknown variant" in str(error):
            lines += ["", *_wrapped(f"variants: {str(error).rpartition('; ')[2]}")]
    return "\n".join([head, *lines]) + "\n"


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 80, subsequent_indent=" " * 6, break_on_hyphens=False)
