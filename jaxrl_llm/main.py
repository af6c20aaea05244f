"""python -m jaxrl_llm.main --config gspo[:variant] --workdir DIR [--config.block.field=value ...]"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

from jaxrl_llm.config.command_line import Parser, add_place, add_processes, fields_and_rest, local_folder
from jaxrl_llm.config.guard import Guard, command


@command
def main(arguments: list[str], guard: Guard) -> int:
    """Start or resume the run of a DIR; returns the exit code (see command_line.py)."""
    from jaxrl_llm.config import listed, loading

    epilog = _help(arguments) if {"-h", "--help", "--helpfull"} & set(arguments) else ""
    parser = Parser(prog="jaxrl-llm train", description="Start or resume a training run.", epilog=epilog)
    parser.add_argument("--config", required=True, help="NAME[:variant], or the path of a file with get_config")
    parser.add_argument(
        "--workdir", required=True, type=local_folder, help="the run's DIR; the same command resumes it"
    )
    add_place(parser)
    parser.add_argument("--restart", action="store_true", help="erase the run that the DIR holds and start anew")
    add_processes(parser)
    fields, rest = fields_and_rest(arguments)
    given = parser.parse_args(rest)
    source = loading.find(given.config)
    listed.check_names(path for path, _ in fields)

    # JAX is imported from here on.
    from jaxrl_llm.config import start_up
    from jaxrl_llm.ground import processes, sharding
    from jaxrl_llm.records import checkpointing, places, provenance, recorded
    from jaxrl_llm.records.run_log import RunLog
    from jaxrl_llm.run import assembly, opening, run_dir, sameness, trainer
    from jaxrl_llm.run.settings import config_hash, resolved_objective, validate

    def onward() -> str:
        if isinstance(root, Path) and not checkpointing.steps_of(root):
            return ""
        same = "the same command without --restart" if given.restart else "the same command"
        return f"; {same} goes on from the newest checkpoint"

    with contextlib.ExitStack() as stack:
        config = loading.load(source, fields)
        settings, identity = validate(config), config_hash(config)
        root = places.root_of(given.workdir, given.checkpoints)
        flags_set = start_up.start_jax()
        start_up.join(given, settings.processes.start_timeout_s, settings.processes.heartbeat_timeout_s)
        sharding.visible()  # or one line on JAX_PLATFORMS
        sameness.check(config.to_dict(), settings, os.fspath(root), restart=given.restart)
        run_dir.check(given.workdir, config, restart=given.restart, root=root)
        reached = "" if given.restart else opening.finished(given.workdir, settings.steps)
        if processes.largest(bool(reached)):  # with a PLACE the other processes have no logs to read it from
            print(f"{reached}\n{opening.closing(given.workdir)}" if reached else "finished, as process 0 says")
            return 0
        run, first = assembly.build(settings), start_up.is_first()
        _ = run.warnings  # raises where every result would be wrong
        run.memory().check()
        if first and not given.restart and (said := recorded.bring_back(given.workdir, root)):
            print(said)
        log = stack.enter_context(RunLog(given.workdir, settings.steps, write=first, wandb=settings.log.wandb))
        guard.started, guard.workdir, guard.onward = True, Path(given.workdir), onward
        run_dir.begin(given.workdir, restart=given.restart, root=root)
        if flags_set:
            log.note(f"flags      {flags_set}")
        record = provenance.describe(config.to_dict(), identity, source) | run.made_from
        log.write_config(record | {"objective": resolved_objective(config.to_dict(), settings)})
        log.result(trainer.train(run, log, identity))
    return 0


def _help(arguments: list[str]) -> str:
    """The fields of every config, then those that the given one sets, for which JAX is imported."""
    from jaxrl_llm.config import listed

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    name = parser.parse_known_args(arguments)[0].config
    if not name:
        return listed.field_help()
    from jaxrl_llm.run.fields import config_help

    return f"{listed.field_help()}\n{config_help(name)}"


if __name__ == "__main__":
    sys.exit(main())
