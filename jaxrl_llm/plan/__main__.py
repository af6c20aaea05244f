"""python -m jaxrl_llm.plan --config NAME --topology v5p:4x4x4 [--config.mesh.shape=...] [--json OUT]"""

import sys
from pathlib import Path

from jaxrl_llm.config.command_line import Parser, check_folders, fields_and_rest
from jaxrl_llm.config.guard import Guard, command
from jaxrl_llm.plan import PROGRAMS


@command
def main(arguments: list[str], guard: Guard) -> int:
    """Plan a config for chips; returns the exit code (see command_line.py)."""
    from jaxrl_llm.config import listed, loading

    parser = Parser(
        prog="jaxrl-llm plan", description="Memory and time of a config on TPUs or GPUs, without having them."
    )
    parser.add_argument("--config", required=True, help="NAME[:variant], or the path of a file with get_config")
    parser.add_argument(
        "--topology", required=True, help="the chips: v5p:4x4x4, two slices v5e:4x4:2, four nodes h100:32"
    )
    parser.add_argument(
        "--only", nargs="+", default=(), choices=PROGRAMS, metavar="PROGRAM", help="only move, rollout, score or update"
    )
    parser.add_argument(
        "--trace", action="store_true", help="trace, do not compile: times, and the memory of what stays"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    fields, rest = fields_and_rest(arguments)
    given = parser.parse_args(rest)
    check_folders(json=given.json)
    source = loading.find(given.config)
    listed.check_names(path for path, _ in fields)

    # JAX is imported from here on.
    from absl import logging

    from jaxrl_llm.plan.chips import compilers_to_a_file
    from jaxrl_llm.plan.table import as_json, as_rows, plan, table
    from jaxrl_llm.run.settings import validate

    logging.set_verbosity(logging.WARNING)
    settings = validate(loading.load(source, fields))
    with compilers_to_a_file() as log:
        made = plan(settings, given.topology, given.only, compiles=not given.trace)
    print(table(made))
    if log.stat().st_size:
        print(f"the compiler's messages: {log}")
    if given.json:
        given.json.write_text(as_json(made, as_rows(made)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
