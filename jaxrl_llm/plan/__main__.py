"""python -m jaxrl_llm.plan --config NAME --topology v5p:4x4x4 [--config.mesh.shape=...] [--json OUT]"""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import logging

from jaxrl_llm.config import loading
from jaxrl_llm.config.command_line import REFUSED, Parser, complain, fields_and_rest
from jaxrl_llm.plan.programs import PROGRAMS
from jaxrl_llm.plan.table import as_json, plan, table
from jaxrl_llm.run.settings import validate


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="jaxrl-llm plan", description="Memory and time of a config on TPUs or GPUs, without having them."
    )
    parser.add_argument("--config", required=True, help="NAME[:variant], or the path of a file with get_config")
    parser.add_argument("--topology", required=True, help="the chips: v5e:2x2, v5p:4x4x4, v6e:2x2, h100:8")
    parser.add_argument(
        "--only", nargs="+", default=(), choices=PROGRAMS, metavar="PROGRAM", help="only move, rollout, score or update"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    logging.set_verbosity(logging.WARNING)
    try:
        fields, rest = fields_and_rest(sys.argv[1:] if arguments is None else arguments)
        given = parser.parse_args(rest)
        made = plan(validate(loading.load(loading.find(given.config), fields)), given.topology, given.only)
    except (ValueError, OSError, ImportError) as error:
        return complain(error, REFUSED)
    print(table(made))
    if given.json:
        given.json.write_text(as_json(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
