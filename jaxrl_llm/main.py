"""python -m jaxrl_llm.main --config gspo[:variant] --workdir DIR [--config.block.field=value ...]"""

import contextlib
import sys
from collections.abc import Sequence

from jaxrl_llm.config import loading, start_up
from jaxrl_llm.config.command_line import FAILED, REFUSED, Parser, complain, fields_and_rest
from jaxrl_llm.records import provenance
from jaxrl_llm.records.run_log import RunLog
from jaxrl_llm.run import run_dir, sameness
from jaxrl_llm.run.assembly import build
from jaxrl_llm.run.fields import field_help
from jaxrl_llm.run.opening import closing, finished
from jaxrl_llm.run.settings import config_hash, validate
from jaxrl_llm.run.trainer import train


def main(arguments: Sequence[str] | None = None) -> int:
    """Start or resume the run of a DIR; returns the exit code (see command_line.py)."""
    try:
        return start_up.leave(_run(sys.argv[1:] if arguments is None else list(arguments)))
    except KeyboardInterrupt as stop:
        print(f"\n{stop or 'stopped'}; the same command goes on from the newest checkpoint")
        return start_up.leave(128 + getattr(stop, "signal", 2), alone=not getattr(stop, "saved", False))


def _run(arguments: list[str]) -> int:
    epilog = field_help() if {"-h", "--help", "--helpfull"} & set(arguments) else ""
    parser = Parser(prog="jaxrl-llm train", description="Start or resume a training run.", epilog=epilog)
    parser.add_argument("--config", required=True, help="NAME[:variant], or the path of a file with get_config")
    parser.add_argument("--workdir", required=True, help="the run's DIR; the same command resumes it")
    parser.add_argument("--restart", action="store_true", help="erase the run that the DIR holds and start anew")
    start_up.add_arguments(parser)
    with contextlib.ExitStack() as stack:
        try:
            fields, rest = fields_and_rest(arguments)
            given = parser.parse_args(rest)
            source = loading.find(given.config)
            config = loading.load(source, fields)
            settings, identity = validate(config), config_hash(config)
            start_up.start_jax()
            start_up.join(given, settings.processes.start_timeout_s, settings.processes.heartbeat_timeout_s)
            sameness.check(config.to_dict(), settings, given.workdir, restart=given.restart)
            run_dir.check(given.workdir, config, restart=given.restart)
            if not given.restart and (reached := finished(given.workdir, settings.steps)):
                print(f"{reached}\n{closing(given.workdir)}")
                return 0
            run, first = build(settings), start_up.is_first()
            run.memory().check()
            log = stack.enter_context(RunLog(given.workdir, settings.steps, write=first, wandb=settings.log.wandb))
        except (ValueError, OSError, ModuleNotFoundError) as error:
            return complain(error, REFUSED)
        try:
            run_dir.begin(given.workdir, restart=given.restart)
            log.write_config(provenance.describe(config.to_dict(), identity, source) | run.made_from)
            log.result(train(run, log, identity))
        except (ValueError, OSError, FloatingPointError) as error:
            return complain(error, FAILED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
