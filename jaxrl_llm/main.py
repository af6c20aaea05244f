"""python -m jaxrl_llm.main --config gspo[:variant] --workdir DIR [--config.block.field=value ...]

`train` is the same in Python.
"""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.config.command_line import Parser, add_place, add_processes, fields_and_rest, local_folder
from jaxrl_llm.config.guard import Guard, command

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from jaxrl_llm.config.loading import Source


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
    same = shlex.join(["python", "-m", "jaxrl_llm.main", *(one for one in arguments if one != "--restart")])
    _train(source, fields, given, guard, f"to go on from the newest checkpoint: {same}")
    return 0


def train(
    config: "str | os.PathLike[str] | ConfigDict",
    workdir: str | os.PathLike[str],
    fields: Mapping[str, Any] | None = None,
    *,
    restart: bool = False,
    checkpoints: str = "",
) -> dict[str, Any]:
    """Start or resume the run of a DIR, and return its last evaluation, such as {"eval/greedy": 0.6, ...}.

    Args:
      config: as `--config` has it, NAME[:variant] or the path of a file with get_config; or a ConfigDict.
      workdir: the run's DIR; the same call resumes it.
      fields: {"block.field": value} to set in the config.
      restart: erase the run that the DIR holds and start anew.
      checkpoints: as `--checkpoints` has it, where they are kept; "": where the DIR says, or in the DIR.

    Raises:
      ValueError, OSError, ImportError: what the command says in one line.
      FloatingPointError: a loss or gradient is not finite.
      KeyboardInterrupt: a signal stopped the run, after the step and its checkpoint.
    """
    from jaxrl_llm.config import loading

    place = {"workdir": os.fspath(workdir), "restart": restart, "checkpoints": checkpoints}
    given = argparse.Namespace(**place, coordinator=None, processes=None, process=None)
    texts = [(path, str(value)) for path, value in (fields or {}).items()]
    named = isinstance(config, str | os.PathLike)
    return _train(loading.find(os.fspath(config)) if named else config, texts, given, Guard(), "the same call goes on")


def _train(
    source: "Source | ConfigDict",
    fields: Sequence[tuple[str, str]],
    given: argparse.Namespace,
    guard: Guard,
    again: str,
) -> dict[str, Any]:
    # JAX is imported from here on.
    from jaxrl_llm.check import doubts, fits, fresh_weights
    from jaxrl_llm.config import loading, start_up
    from jaxrl_llm.ground import processes, sharding
    from jaxrl_llm.records import checkpointing, places, provenance, recorded
    from jaxrl_llm.records.progress import told
    from jaxrl_llm.records.run_log import RunLog, read_json
    from jaxrl_llm.run import assembly, joint_start, opening, run_dir, trainer
    from jaxrl_llm.run.settings import config_hash, resolved_objective, validate

    def onward() -> str:
        if isinstance(root, Path) and not checkpointing.steps_of(root):
            return ""
        return f"; {again}"

    with contextlib.ExitStack() as stack:
        config: Any
        file = source if isinstance(source, loading.Source) else None
        if isinstance(source, loading.Source):
            config = loading.load(source, fields)
        else:
            config = loading.with_fields(source.copy_and_resolve_references(), fields)
        settings, identity = validate(config), config_hash(config)
        root = places.root_of(given.workdir, given.checkpoints)
        flags_set = start_up.start_jax()
        start_up.join(given, settings.processes.start_timeout_s, settings.processes.heartbeat_timeout_s)
        sharding.visible()  # or one line on JAX_PLATFORMS
        if not given.restart and run_dir.keep_day(given.workdir, config, root):
            settings = validate(config)
        config.task.date = settings.task.day or config.task.date
        joint_start.check(config.to_dict(), settings, os.fspath(root), restart=given.restart)
        run_dir.check(given.workdir, config, restart=given.restart, root=root, given=bool(given.checkpoints))
        reached = "" if given.restart else opening.finished(given.workdir, settings.steps, settings.checkpoint)
        if processes.largest(bool(reached)):  # with a PLACE the other processes have no logs to read it from
            print(f"{reached}\n{opening.closing(given.workdir)}" if reached else "finished, as process 0 says")
            return read_json(Path(given.workdir) / "result.json") or {}
        run, first = assembly.build(settings), start_up.is_first()
        survey = doubts.of_run(run)  # raises where every result would be wrong
        if given.restart or not checkpointing.steps_of(root):
            fresh_weights.confirm(survey.doubts)
        if first and not given.restart and (said := recorded.bring_back(given.workdir, root)):
            print(said)
        # A DIR that cannot be written, or that another process writes, is refused before minutes of compiling.
        log = stack.enter_context(RunLog(given.workdir, settings.steps, write=first, wandb=settings.log.wandb))
        say = print if first else lambda text: None
        with told(say):
            memory = fits.fits(run, say)
        memory.check()
        guard.started, guard.workdir, guard.onward = True, Path(given.workdir), onward
        run_dir.begin(given.workdir, restart=given.restart, root=root)
        if flags_set:
            log.note(f"flags      {flags_set}")
        record = provenance.describe(config.to_dict(), identity, file) | run.made_from
        record |= {"data": survey.splits} if survey.splits else {}
        made = {"objective": resolved_objective(config.to_dict(), settings), "task": settings.task.sentence}
        made |= {"solved": settings.task.solved}
        log.write_config(record | made)
        log.note(opening.opening(run, given.workdir, memory.lines(), survey.table()))
        log.warn(survey.doubts)
        evaluated = trainer.train(run, log, identity)
        log.result(evaluated)
        return evaluated


def _help(arguments: list[str]) -> str:
    """The fields of every config, then those that the given one sets, for which JAX is imported."""
    from jaxrl_llm.config import listed

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    name = parser.parse_known_args(arguments)[0].config
    if not name:
        return listed.field_help()
    from jaxrl_llm.run.config_help import config_help

    return f"{listed.field_help()}\n{config_help(name)}"


if __name__ == "__main__":
    sys.exit(main())
