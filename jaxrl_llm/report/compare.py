"""jaxrl-llm compare DIR DIR ...: where configs differ, scores, curves, and answers to the same prompts side by side."""

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_llm.config.command_line import Parser
from jaxrl_llm.config.guard import Guard, command
from jaxrl_llm.ground.terminal import visible

_PROMPTS = 3  # of each split that are printed

if TYPE_CHECKING:  # numpy and matplotlib are imported once the command line is known to be right
    from jaxrl_llm.report.read import Run, Study


@command
def main(arguments: list[str], guard: Guard) -> int:
    """Compare DIRs; returns the exit code (see command_line.py)."""
    parser = Parser(prog="jaxrl-llm compare", description="DIRs side by side: configs, scores, curves and answers.")
    parser.add_argument(
        "dirs", nargs="+", type=Path, metavar="DIR", help="of a run, of the seeds of one, or of a sweep"
    )
    parser.add_argument("--out", type=Path, default=Path("comparison"), help="folder of the page; default: comparison")
    given = parser.parse_args(arguments)
    places = [folder.resolve() for folder in given.dirs]
    twice = [str(folder) for folder, place in zip(given.dirs, places, strict=True) if places.count(place) > 1]
    if twice:
        raise ValueError(f"DIR={twice[0]} is given twice; name each DIR once")
    if len(places) == 1:
        raise ValueError(f"DIR={given.dirs[0]} is the only one; name two or more, or use jaxrl-llm report DIR")
    if given.out.resolve() in places:
        raise ValueError(f"--out={given.out} is one of the DIRs; name another folder")

    from jaxrl_llm.report.write import write_page  # here, so that a wrong command line is refused at once

    study, width = together(given.dirs), shutil.get_terminal_size().columns
    written = write_page(study, given.out, "comparison", f"Comparison of {', '.join(study.arms)}", width)
    print(visible(f"{_configs(study, width)}\n\n{_answers(study, width)}{written}"))
    return 0


def _configs(study: "Study", width: int) -> str:
    """The fields in which the configs differ, a line each."""
    from jaxrl_llm.report.page import text_table
    from jaxrl_llm.report.tables import config_table

    header, rows = config_table(study)
    if not rows:
        return "the configs are the same, seeds aside"
    (_, *arms), *fields = zip(header, *rows, strict=True)
    short = [[textwrap.shorten(cell, width // 2, placeholder="...") for cell in field] for field in fields]
    return text_table(["field", *arms], short, width)


def _answers(study: "Study", width: int) -> str:
    """A few answers of the first run of every arm to the same prompts."""
    from jaxrl_llm.report.samples import first_sampled, side_by_side

    runs, lines = first_sampled(study), []
    indent = max((len(run.label) for run in runs), default=0) + 2
    for shared in side_by_side(runs) if len(runs) > 1 else []:
        lines.append(f"{shared.split} prompts at step {shared.step}, answers with rewards")
        for prompt, answers in shared.rows[:_PROMPTS]:
            lines.append(f"  {_line(prompt, width - 2)}")
            for run, (text, reward) in zip(runs, answers, strict=True):
                end = f" ({reward:g})"
                lines.append(f"    {run.label.ljust(indent)}{_line(text, width - indent - 4 - len(end))}{end}")
        lines.append("")
    return "".join(f"{line}\n" for line in lines)


def _line(text: str, width: int) -> str:
    """Text of others in one line of at most this width."""
    return textwrap.shorten(visible(text), max(width, 8), placeholder="...")


def together(folders: Sequence[Path]) -> "Study":
    """The runs of all folders as one study, whose baseline is the first arm of the first folder.

    A folder of one arm is named by itself, the arms of another by folder and arm. Numbered folders in it are seeds.

    Raises:
        FileNotFoundError: there is no run in one of the folders.
    """
    from jaxrl_llm.report.read import Study, load

    studies = [load(folder) for folder in folders]
    ends = [folder.resolve().name for folder in folders]
    runs: list[Run] = []
    for folder, end, study in zip(folders, ends, studies, strict=True):
        name = str(folder) if Counter(ends)[end] > 1 else end
        seeded = all(run.arm.isdigit() and not run.seed for run in study.runs)
        for run in sorted(study.runs, key=lambda run: run.arm != study.baseline):
            arm = name if seeded or len(study.arms) == 1 else f"{name}/{run.arm}"
            runs.append(replace(run, arm=arm, seed=run.arm if seeded else run.seed))
    branching = studies[0].branching if all(study.branching for study in studies) else {}
    unfinished = [line for study in studies for line in study.unfinished]
    damage = [line for study in studies for line in study.damage]
    return Study("", runs, runs[0].arm, branching, unfinished, damage)


if __name__ == "__main__":
    sys.exit(main())
