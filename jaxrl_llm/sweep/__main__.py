"""Run or resume a sweep: check every configuration, print the cost, run what is not finished, report what failed.

    python -m jaxrl_llm.sweep --sweep experiments/routing_replay/sweep.py:quick --workdir runs/quick

A run is the planned one if its config.json holds the planned config hash. It is finished if its DIR holds result.json
and every planned step, or if it diverged. DIR/sweep.json records the plan for the report; parts may share a DIR.
"""

import argparse
import contextlib
import fcntl
import functools
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.config.command_line import Parser, fields_and_rest, local_folder
from jaxrl_llm.config.guard import Guard, guarded
from jaxrl_llm.ground import machine
from jaxrl_llm.ground.ranges import in_range
from jaxrl_llm.ground.terminal import visible
from jaxrl_llm.records import checkout
from jaxrl_llm.sweep.planned import PlannedRun, Sweep, command

Identity = tuple[Any, ...]  # config hash, steps, and the block `checkpoint` where a run may end early


@dataclass(frozen=True)
class Program:
    """The module that a run executes, and the identity of a run of a config file with overrides."""

    module: str
    identify: Callable[[str, Sequence[str]], Identity]


# What takes long to import, JAX above all, is imported inside: a bad command line is refused at once.
def _identify(config_file: str, overrides: Sequence[str]) -> Identity:
    from jaxrl_llm.config import loading
    from jaxrl_llm.run import settings

    config = loading.load(loading.find(config_file), fields_and_rest(overrides)[0])
    own = settings.validate(config)
    return settings.config_hash(config), own.steps, own.checkpoint


def _identify_branches(config_file: str, overrides: Sequence[str]) -> Identity:
    from jaxrl_llm.sweep import forks

    fields, (branches,) = fields_and_rest(overrides)
    planned = forks.plan(config_file, fields, branches.removeprefix("--branches="))
    return planned.identity, planned.parent.settings.steps, planned.parent.settings.checkpoint


MAIN = Program("jaxrl_llm.main", _identify)
BRANCHING = Program("jaxrl_llm.sweep.branching", _identify_branches)  # for a sweep with `branching`


def main(arguments: Sequence[str] | None = None, program: Program | None = None) -> int:
    """The command line, over the program that the sweep needs unless one is given; returns the exit code."""
    return guarded(functools.partial(_command, program), arguments)


def _command(program: Program | None, arguments: list[str], guard: Guard) -> int:
    parser = Parser(prog="jaxrl-llm sweep", description="Run or resume a sweep.")
    parser.add_argument("--sweep", required=True, help="FILE[:variant] that defines get_sweep(variant)")
    parser.add_argument(
        "--workdir",
        required=True,
        type=local_folder,
        help="DIR of the sweep, with the runs in DIR/[condition/]arm/seed",
    )
    parser.add_argument("--launcher", choices=("local", "submitit", "none"), default="local")
    parser.add_argument("--cores", type=int, help="cores to use in all; default: every usable one")
    parser.add_argument("--cores_per_run", type=int, default=1, help="the same for every run")
    parser.add_argument("--cluster", help="submitit's executor (slurm, local, debug); default: what submitit finds")
    given = parser.parse_args(arguments)
    sweep = load_sweep(given.sweep)
    return _run(sweep, program or (BRANCHING if sweep.branching else MAIN), given)


def load_sweep(name: str) -> Sweep:
    """The sweep of FILE or FILE:variant.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file does not run (the message has the line), or it has no get_sweep or not that variant.
    """
    from jaxrl_llm.config import loading

    path, _, variant = name.partition(":")
    if not Path(path).is_file():
        raise FileNotFoundError(f"--sweep={path} does not exist; name a file that defines get_sweep(variant)")
    module = loading.load_module(Path(path))
    if not hasattr(module, "get_sweep"):
        raise ValueError(f"--sweep={path} defines no get_sweep(variant) -> Sweep")
    with loading.one_line(Path(path)):
        sweep = module.get_sweep(variant) if variant else module.get_sweep()
    if not isinstance(sweep, Sweep):
        raise ValueError(f"get_sweep of {path} returned {sweep!r:.80}; return a jaxrl_llm.sweep.Sweep")
    return sweep


def _run(sweep: Sweep, program: Program, given: argparse.Namespace) -> int:
    from jaxrl_llm.report.read import Run
    from jaxrl_llm.sweep import launch

    workdir = machine.folder_of_its_own(given.workdir)
    if (workdir / "metrics.jsonl").exists():
        raise ValueError(f"workdir={workdir} is the DIR of one run; give another --workdir")
    for name in ("cores", "cores_per_run"):  # whatever the launcher makes of them
        if getattr(given, name) is not None:
            in_range(f"--{name}", getattr(given, name), "leave it out for the default", least=1)
    if given.launcher == "submitit":
        launch.check_scheduler(given.cluster)
    slots = launch.core_slots(given.cores, given.cores_per_run) if given.launcher == "local" else []
    runs = sweep.planned()
    identities = {run.folder: _identity(program, run) for run in runs}
    lines = {run.folder: command(run, given.workdir, program.module) for run in runs}
    machine.refuse_links(*{workdir / folder for run in runs for folder in (run.folder, *Path(run.folder).parents)})
    workdir.mkdir(parents=True, exist_ok=True)
    with open(workdir / ".sweep.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OSError(
                f"workdir={workdir} is in use by another sweep or by runs it left; wait or stop them"
            ) from error
        todo = [run for run in runs if not _finished(workdir / run.folder, *identities[run.folder])]
        _write_plan(workdir, sweep, identities)
        _keep_changes(workdir)
        (workdir / "commands.txt").write_text("".join(f"{line}\n" for line in lines.values()))
        print(f"{sweep.question}\n{len(runs)} runs, {len(runs) - len(todo)} finished, {len(todo)} to do")
        if given.launcher == "none":
            print(f"wrote {workdir / 'commands.txt'}: one line a run")
            return 0
        if given.launcher == "submitit":
            waiting = [lines[run.folder] for run in todo]
            jobs = launch.submit(waiting, workdir, given.cluster, cores=given.cores_per_run, minutes=sweep.minutes)
            print(f"submitted {len(jobs)} jobs: {', '.join(str(job.job_id) for job in jobs)}")
            return 0
        if not todo:
            return 0
        about = -(-len(todo) // len(slots)) * sweep.minutes
        print(
            f"{len(slots)} at a time on {given.cores_per_run} cores each, {sweep.minutes:g} min a run: {about:.0f} min"
        )
        stopped = launch.run_locally(todo, workdir, slots=slots, module=program.module, lock=lock.fileno())
    failed = [run for run in stopped if not Run(workdir / run.folder, run.arm).diverged]
    for run in failed:
        log = workdir / run.folder / "process.log"
        print(f"\n{run} failed; the end of {log}:")
        print(visible("\n".join(f"  {line}" for line in launch.tail(log))))
    diverged = len(stopped) - len(failed)
    print(f"{len(todo) - len(stopped)} runs finished, {diverged} diverged, {len(failed)} failed")
    print(f"for the page: python -m jaxrl_llm.report {given.workdir}")
    return 1 if failed else 0


def _identity(program: Program, run: PlannedRun) -> Identity:
    try:
        return program.identify(run.config, run.overrides)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"the configuration of {run} is refused: {error}") from error


def _finished(folder: Path, config_hash: str, steps: int, checkpoint: Any = None) -> bool:
    from jaxrl_llm.report.read import Run
    from jaxrl_llm.run.best_so_far import ended_early

    run = Run(folder, "")
    found = run.record.get("config_hash", config_hash)
    if run.damage:
        raise ValueError(run.damage[0])
    if found != config_hash:
        raise ValueError(
            f"{folder} holds a run of another configuration (config_hash {found}, "
            f"planned {config_hash}); give another --workdir, or remove that folder"
        )
    early = checkpoint is not None and ended_early(folder, checkpoint)
    whole = run.finished and bool(run.rows) and (early or run.rows[-1]["step"] >= steps)
    return whole or run.diverged  # the same command would diverge again


def _write_plan(workdir: Path, sweep: Sweep, identities: Mapping[str, Identity]) -> None:
    """The plan, with the runs that other parts of the sweep have begun in this DIR: those of equal baseline and
    branching."""
    from jaxrl_llm.records.run_log import read_json, write_json

    rows = [
        {"folder": run.folder, "arm": arm, "condition": run.condition, "seed": run.seed, "config": run.config}
        | {"fields": dict(run.fields), "config_hash": identities[run.folder][0]}
        for run in sweep.planned()
        for arm in run.arms
    ]
    plan = {"question": sweep.question, "baseline": sweep.baseline, "pairs": "runs of one condition and seed"}
    if sweep.branching is not None:
        plan |= {"branching": sweep.branching.numbers(), "pairs": "branches from one state of a trajectory (seed)"}
    path = workdir / "sweep.json"
    with contextlib.suppress(ValueError, KeyError, TypeError):  # what is no plan is replaced
        before = read_json(path) or {"runs": []}
        if all(before.get(name) == plan.get(name) for name in ("baseline", "branching")):
            begun = [row for row in before["runs"] if (workdir / row["folder"] / "config.json").exists()]
            rows = [row for row in begun if row["folder"] not in identities] + rows
    write_json(path, plan | {"runs": rows})


def _keep_changes(workdir: Path) -> None:
    """Save `git diff` of a dirty checkout, one file per state of the code."""
    files = checkout.changed()
    if not files:
        return
    diff = checkout.changes()
    path = workdir / f"changes-{hashlib.sha256(diff.encode()).hexdigest()[:8]}.diff"
    path.write_text(diff)
    named = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    print(
        f"warning: the code differs from commit {(checkout.commit() or '')[:7]} in {named}; {path} has the difference. "
        "Commit it before runs whose numbers are to be cited"
    )


if __name__ == "__main__":
    sys.exit(main())
