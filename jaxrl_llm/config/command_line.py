"""One-line errors, exit codes and config fields among the arguments, for all commands.

0    done
1    failed: what was started could not end (weights or a loss that are not finite, a full disk, a damaged
     checkpoint), or a check has found what stops a run
2    refused: the command line, the config or the DIR is wrong, and nothing was started or written
70   a fault of the package: the line names the file with the traceback, and where to report it
130  stopped by Ctrl-C, 143 by SIGTERM, 129 by the end of its terminal (SIGHUP): a run that was training has saved its
     state, and the same command resumes it
134  of several processes: JAX aborted this one because another is gone (see docs/several_processes.md)
141  the reader of its output is gone, as `head` is after ten lines
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxrl_llm.ground.terminal import visible

FAILED, REFUSED, FAULT, BROKEN_PIPE = 1, 2, 70, 141
EXIT_CODES = (
    "exit codes: 0 done, 1 failed, 2 refused, 130 stopped by Ctrl-C, 143 by SIGTERM,\n"
    "129 by the end of its terminal, 70 a fault of jaxrl_llm, 141 output not read"
)


def complain(error: BaseException, code: int) -> int:
    """Print `error: ...` on standard error, in one line; returns the exit code."""
    text = " ".join(str(error).split()) or type(error).__name__
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"error: {visible(text)}", file=sys.stderr)
    return code


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from jaxrl_llm.config.about import versions  # here, as it takes longer than all the rest

        print(versions())
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one line with exit code 2, and a near miss is named."""

    def __init__(self, *, epilog: str = "", **keywords: Any):
        keywords |= {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(epilog=f"{epilog}\n\n{EXIT_CODES}".lstrip(), **keywords)
        self.add_argument("--version", action=_Version, nargs=0, help="print the versions and exit")

    def error(self, message: str) -> NoReturn:
        raise SystemExit(complain(ValueError(f"{message}; see --help"), REFUSED))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            import difflib

            flags = [flag for action in self._actions for flag in action.option_strings]
            close = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
            hint = f"did you mean {close[0]}?" if close else "fields are set as --config.block.field=value"
            self.error(f"unknown argument {unknown[0]}; {hint}")
        return given


def local_folder(text: str) -> str:
    """Return --workdir as a folder; a URL is refused, since it would be taken for one."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} is no folder of this machine, and a DIR is: it is locked and appended to line by line, which an "
            f"object store cannot do; give --workdir runs/NAME --checkpoints {text}"
        )
    return text


def check_folders(**files: Path | None) -> None:
    """Raise ValueError, before the work, for an option with a file to write whose folder is missing."""
    for name, path in files.items():
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"--{name}={path}: there is no folder {path.parent}; make it")


def add_place(parser: argparse.ArgumentParser) -> None:
    """--checkpoints, for `records.places.root_of`."""
    parser.add_argument(
        "--checkpoints",
        default="",
        metavar="PLACE",
        help="folder or gs://BUCKET/FOLDER of the checkpoints; default: where the DIR says, or the DIR",
    )


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Which of several processes this is, for `start_up.join`."""
    parser.add_argument("--coordinator", help="HOST:PORT of process 0 of several, see docs/several_processes.md")
    parser.add_argument("--processes", type=int, help="how many processes there are")
    parser.add_argument("--process", type=int, help="which of them this is, from 0")


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
