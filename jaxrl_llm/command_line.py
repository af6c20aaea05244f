"""What all commands share: one-line errors, exit codes, and a --help that lists the fields.

0    done
1    failed: what was started could not end (a loss that is not finite, a full disk, a damaged checkpoint)
2    refused: the command line, the config or the DIR is wrong, and nothing was started or written
130  stopped by Ctrl-C, 143 by SIGTERM: a run has saved its state, and the same command resumes it
134  of several processes: JAX aborted this one because another is gone (see docs/several_processes.md)
"""

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxrl_llm import configuration

__all__ = ["EXIT_CODES", "FAILED", "REFUSED", "Parser", "complain", "field_help", "fields_and_rest"]

FAILED, REFUSED = 1, 2
EXIT_CODES = "exit codes: 0 done, 1 failed, 2 refused, 130 stopped by Ctrl-C, 143 by SIGTERM"
_WIDTH = 80


def complain(error: BaseException, code: int) -> int:
    """Print `error: ...` on standard error, in one line; returns the exit code."""
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"error: {text}", file=sys.stderr)
    return code


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one line with exit code 2, and a near miss is named."""

    def __init__(self, *, epilog: str = "", **keywords: Any):
        kind = argparse.RawDescriptionHelpFormatter
        epilog = f"{epilog}\n\n{EXIT_CODES}".lstrip()
        super().__init__(epilog=epilog, allow_abbrev=False, formatter_class=kind, **keywords)

    def error(self, message: str) -> NoReturn:
        raise SystemExit(complain(ValueError(f"{message}; see --help"), REFUSED))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            close = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
            hint = f"did you mean {close[0]}?" if close else "fields are set as --config.block.field=value"
            self.error(f"unknown argument {unknown[0]}; {hint}")
        return given


def fields_and_rest(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """([("block.field", "value"), ...], the other arguments) of a command line.

    Raises:
        ValueError: a field has no value.
    """
    fields, rest, waiting = [], [], list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("--config."):
            rest.append(argument)
            continue
        name, given, value = argument.removeprefix("--config.").partition("=")
        if not given and (not waiting or waiting[0].startswith("--")):
            raise ValueError(f"{argument} has no value; set it as {argument}=value")
        fields.append((name, value if given else waiting.pop(0)))
    return fields, rest


def field_help() -> str:
    """Every field with its default and its comment in configs/base.py, at most 80 columns wide."""
    source = (configuration.CONFIGS / "base.py").read_text()
    order = re.findall(r"^ +config\.([\w.]+) = ", source, re.MULTILINE)
    comments = dict(re.findall(r"^ +config\.([\w.]+) = .*?  # (.*)$", source, re.MULTILINE))

    from jaxrl_llm import objectives  # here, because it imports JAX, and a sweep refuses a bad line without

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
    for field, value in sorted(configuration.flat(configuration.load(configuration.find("base"))).items(), key=place):
        if field.rpartition(".")[0] != block:
            block = field.rpartition(".")[0]
            lines += ["", *_wrapped(f"{block}: {comments[block]}" if block in comments else block)] if block else [""]
        comment = f"  {comments[field]}" if field in comments else ""
        lines += _wrapped(f"  --config.{field}={value}{comment}")
    return "\n".join(lines)


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, _WIDTH, subsequent_indent=" " * 6, break_on_hyphens=False)
