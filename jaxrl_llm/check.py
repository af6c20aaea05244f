"""python -m jaxrl_llm.check --config gspo[:variant] [--config.block.field=value ...]"""

import sys

from jaxrl_llm.config.command_line import FAILED, Parser, add_processes, fields_and_rest
from jaxrl_llm.config.guard import Guard, command


@command
def main(arguments: list[str], guard: Guard) -> int:
    """Rehearse a run and print what is doubtful; returns the exit code: 1 where a row says stop."""
    from jaxrl_llm.config import loading
    from jaxrl_llm.config.listed import check_names

    parser = Parser(prog="jaxrl-llm check", description="Rehearse two steps of a run on this machine, without a DIR.")
    parser.add_argument("--config", required=True, help="NAME[:variant], or the path of a file with get_config")
    add_processes(parser)
    fields, rest = fields_and_rest(arguments)
    given = parser.parse_args(rest)
    source = loading.find(given.config)
    check_names(path for path, _ in fields)

    # JAX is imported from here on.
    from jaxrl_llm.config import start_up
    from jaxrl_llm.run import assembly, sameness
    from jaxrl_llm.run.checkup import checked
    from jaxrl_llm.run.findings import STOP, table
    from jaxrl_llm.run.settings import validate

    def note(text: str) -> None:
        if start_up.is_first():
            print(text, file=sys.stderr)

    config = loading.load(source, fields)
    settings = validate(config)
    start_up.start_jax()
    start_up.join(given, settings.processes.start_timeout_s, settings.processes.heartbeat_timeout_s)
    sameness.check(config.to_dict(), settings, "", restart=True)  # no DIR, and no checkpoint that counts
    run = assembly.build(settings)
    guard.started = True
    findings, answers = checked(run, note)
    if start_up.is_first():
        print("\n\n".join(filter(None, [table(findings), answers])))
    return FAILED if any(found.verdict == STOP for found in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
