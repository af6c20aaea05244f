"""What is written from the declarations of all fields: configs/fields.txt, configs/base.py's body, docs' tables."""

import inspect
import itertools
import textwrap

import numpy as np

from jaxrl_llm import objectives
from jaxrl_llm.ground.ranges import rule
from jaxrl_llm.run.fields import BLOCKS, declared_fields

_OWN_RECIPES = """\
    for field, declared in objectives.fields(loaded=True).items():  # and those of recipes of your own
        config.objective[field] = placeholder(declared.kind)
"""
_ELSEWHERE = "\n[Objectives](objectives.md) has the table of every hyper-parameter of every recipe.\n"
_HEAD = "| field | type | default | range or choices | meaning |\n| -- | -- | -- | -- | -- |\n"


def blocks():
    """(block, [(field, declaration), ...]) of every block, "" for the fields that are in none."""
    for block, items in itertools.groupby(declared_fields().items(), lambda item: item[0].rpartition(".")[0]):
        yield block, [(path.rpartition(".")[2], own) for path, own in items]


def meanings():
    """{block: what it is, in one line}."""
    lines = {name: (inspect.getdoc(cls) or "").partition("\n")[0].removesuffix(".") for name, cls in BLOCKS.items()}
    return lines | {"objective": "What is maximised: a recipe and its hyper-parameters, None for the recipe's own"}


def field_help():
    """Every field with its default, its choices and its meaning, then the recipes, at most 80 columns wide: the text of
    configs/fields.txt, which `--help` prints (config/listed.py)."""
    lines = ["fields, their defaults and what they mean; a config changes some of them:", ""]
    for block, fields in blocks():
        if block:
            lines += ["", *_wrapped(f"{block}: {meanings()[block]}")]
        for name, own in fields:
            path = f"{block}.{name}" if block else name
            lines += _wrapped(f"  --config.{path}={own.default}  {own.comment}")
    lines += ["", *_wrapped(f"recipes: {', '.join(objectives.names())}")]
    return "\n".join(lines) + "\n"


def base_lines():
    """The assignments of configs/base.py."""
    text = ""
    for block, fields in blocks():
        text += f"\n    config.{block} = ConfigDict()  # {meanings()[block]}\n" if block else ""
        for name, own in fields:
            value = f"placeholder({own.kind.__name__})" if own.default is None else _written(own.default)
            value = "ConfigDict()" if value == "{}" else f"ConfigDict({value})" if own.kind is dict else value
            path = f"{block}.{name}" if block else name
            told = own.comment if block != "objective" or name == "name" else ""
            text += f"    config.{path} = {value}" + (f"  # {told}\n" if told else "\n")
        text += _OWN_RECIPES if block == "objective" else ""
    return text


def doc_tables():
    """A section with a table for every block."""
    text = ""
    for block, fields in blocks():
        text += f"\n## {block}\n\n{meanings()[block]}.\n\n" if block else "\n## The run\n\n"
        text += _HEAD
        for name, own in fields[:1] if block == "objective" else fields:
            kind = own.kind.__name__ + (f" of {own.element.__name__}" if own.kind is tuple else "")
            default = "" if own.default is None else f"`{_written(own.default)}`"
            cells = (f"`{name}`", kind, default, own.choices or rule(**own.limits), own.meaning)
            text += "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |\n"
        text += _ELSEWHERE if block == "objective" else ""
    return text


def _wrapped(line):
    return textwrap.wrap(line, 80, subsequent_indent=" " * 6, break_on_hyphens=False)


def _written(value):
    """The value in Python, as a person writes it: 3e-4, "text"."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}": {_written(one)}' for key, one in value.items()) + "}"
    if isinstance(value, float) and 0 < value < 0.01:
        return np.format_float_scientific(value, trim="-", exp_digits=1)
    return f'"{value}"' if isinstance(value, str) else repr(value)
