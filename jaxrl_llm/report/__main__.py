"""python -m jaxrl_llm.report DIR: tables, figures and a page of finished or running runs."""

import shutil
import sys

from jaxrl_llm.config.command_line import Parser, add_place
from jaxrl_llm.config.guard import Guard, command


@command
def main(arguments: list[str], guard: Guard) -> int:
    """Write the report of a DIR; returns the exit code (see command_line.py)."""
    parser = Parser(prog="jaxrl-llm report", description="Tables, figures and a page of finished or running runs.")
    parser.add_argument("dir", help="the DIR of a run, of several runs or of a sweep")
    add_place(parser)
    given = parser.parse_args(arguments)

    from jaxrl_llm.report.write import write_report  # here, so that a wrong command line is refused at once

    if given.checkpoints:
        from jaxrl_llm.run.reopened import fetched

        fetched(given.dir, given.checkpoints)
    print(write_report(given.dir, shutil.get_terminal_size().columns))  # piped: COLUMNS, or 80
    return 0


if __name__ == "__main__":
    sys.exit(main())
