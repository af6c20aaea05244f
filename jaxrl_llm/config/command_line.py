"""What all commands share: one-line errors, exit codes, and fields among the arguments.

0    done
1    failed: what was started could not end (a loss that is not finite, a full disk, a damaged checkpoint)
2    refused: the command line, the config or the DIR is wrong, and nothing was started or written
130  stopped by Ctrl-C, 143 by SIGTERM: a run has saved its state, and the same command resumes it
134  of several processes: JAX aborted this one because another is gone (see docs/several_processes.md)
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxrl_llm.ground.terminal import visible

FAILED, REFUSED = 1, 2
EXIT_CODES = "exit codes: 0 done, 1 failed, 2 refused, 130 stopped by Ctrl-C, 143 by SIGTERM"


def complain(error: BaseException, code: int) -> int:
    """Print `error: ...` on standard error, in one line; returns the exit code."""
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"error: {visible(text)}", file=sys.stderr)
    return code


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one line with exit code 2, and a near miss is named."""

    def __init__(self, *, epilog: str = "", **keywords: Any):
        keywords |= {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(epilog=f"{epilog}\n\n{EXIT_CODES}".lstrip(), **keywords)

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
    """([("block.field", "value"), ...], the other arguments) of a command line; raises ValueError without a value."""
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
