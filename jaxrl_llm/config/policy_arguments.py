"""Arguments that name a policy, of the commands that read one."""

import argparse
from pathlib import Path

from jaxrl_llm.config.command_line import add_place, local_folder


def add_policy(parser: argparse.ArgumentParser) -> None:
    """--workdir or --checkpoint, one of which `run.loaded.from_arguments` reads."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--workdir", type=lambda text: Path(local_folder(text)), help="the DIR of a run")
    where.add_argument(
        "--checkpoint", type=Path, help="a folder of a checkpoint, a GGUF file, or OWNER/NAME on the hub"
    )
    add_step(parser)
    add_place(parser)
    add_trust(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of a --checkpoint; default: as stored")


def add_step(parser: argparse.ArgumentParser) -> None:
    """--step, for `run.reopened.restored`."""

    def step(text: str) -> int | str:
        if text != "best" and not text.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is neither the number of a step nor best")
        return text if text == "best" else int(text)

    told = "which checkpoint of the DIR: a number, or best (of checkpoint.best); default: the newest that is intact"
    parser.add_argument("--step", type=step, help=told)


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust-code", action="store_true", help="run the code that the DIR names; see SECURITY.md")
