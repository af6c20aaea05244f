"""python -m jaxrl_llm.report DIR: tables, figures and a page of finished or running runs."""

import argparse
import shutil
import sys
from collections.abc import Sequence

from jaxrl_llm.report.write import write_report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.report", description="Tables, figures and a page of finished or running runs."
    )
    parser.add_argument("dir", help="the DIR of a run, of several runs or of a sweep")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    try:
        print(write_report(parser.parse_args(arguments).dir, width))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
