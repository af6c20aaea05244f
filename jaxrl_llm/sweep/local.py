"""Run a sweep's runs as processes on this machine, within a budget of cores."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.ground.machine import usable_cores
from jaxrl_llm.records.run_log import read_rows, write_json
from jaxrl_llm.sweep.planned import PlannedRun

__all__ = ["core_slots", "run_locally"]

_GRACE = 120.0  # seconds that a run has to save its state after an interrupt, before it is killed
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def core_slots(cores: int | None, cores_per_run: int) -> list[set[int]]:
    """Disjoint sets of cores, one a run at a time, all of one size: other core counts give other bits.

    Raises:
        ValueError: a run wants more cores than the budget, or the budget is more than this process may use.
    """
    usable = usable_cores()
    budget = len(usable) if cores is None else cores
    if not 1 <= budget <= len(usable):
        raise ValueError(f"cores={budget} is not between 1 and the {len(usable)} usable cores; set --cores")
    if not 1 <= cores_per_run <= budget:
        raise ValueError(f"cores_per_run={cores_per_run} is not between 1 and cores={budget}; set --cores_per_run")
    starts = range(0, budget - cores_per_run + 1, cores_per_run)
    return [set(usable[start : start + cores_per_run]) for start in starts]


@dataclass
class _Process:
    run: PlannedRun
    folder: Path
    slot: set[int]
    process: subprocess.Popen[Any]
    began: float = field(default_factory=time.monotonic)

    @property
    def compiled(self) -> bool:
        """Whether the run has logged an update: every program that its arm needs is then in the compilation cache."""
        return any(row["step"] > 0 for row in read_rows(self.folder / "metrics.jsonl"))


def run_locally(
    runs: Sequence[PlannedRun],
    workdir: str | os.PathLike[str],
    *,
    slots: Sequence[set[int]],
    module: str,
    lock: int,
    say: Callable[[str], None] = print,
) -> list[PlannedRun]:
    """Run all of them, at most one a slot; return those that failed.

    The first run is alone until its first update, so that the others find warm caches. A run that fails leaves
    failed.json and its output in process.log, and the others go on. On SIGTERM or Ctrl-C the running ones are
    interrupted (they save themselves), and killed when they do not end.

    Args:
        runs: in the order in which they start.
        workdir: the sweep's DIR.
        slots: the cores of each place, from `core_slots`.
        module: the program, run as `python -m module`.
        lock: file descriptor of the sweep's lock. The children inherit it: a sweep that was killed without a chance to
            end its runs leaves the lock to them, and a second sweep is refused until they are gone.
        say: where lines of progress go.

    Raises:
        KeyboardInterrupt: after the runs were stopped.
    """
    waiting, running, failed, minutes = list(runs), [], [], []
    previous = signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    warm = False
    try:
        while waiting or running:
            warm = warm or bool(minutes or failed) or any(process.compiled for process in running)
            free = [slot for slot in slots if all(process.slot != slot for process in running)]
            for slot in free[: None if warm else 1 - len(running)]:
                if waiting:
                    running.append(_start(waiting.pop(0), Path(workdir), slot, module, lock))
                    say(f"start   {running[-1].run}")
            time.sleep(0.1)
            for process in [one for one in running if one.process.poll() is not None]:
                running.remove(process)
                took = (time.monotonic() - process.began) / 60
                if process.process.returncode == 0:
                    minutes.append(took)
                    left = sum(minutes) / len(minutes) * (len(waiting) + len(running)) / len(slots)
                    say(f"done    {process.run}  ({took:.1f} min; about {left:.0f} min left)")
                else:
                    failed.append(process.run)
                    say(f"FAILED  {process.run}  (exit code {process.process.returncode})")
                    code, log = process.process.returncode, process.folder / "process.log"
                    write_json(
                        process.folder / "failed.json", {"exit_code": code, "last_line": (tail(log) or [""])[-1]}
                    )
    except KeyboardInterrupt:
        say(f"interrupted: stopping {len(running)} runs; the same command goes on from here")
        raise
    finally:
        _stop(running)
        signal.signal(signal.SIGTERM, previous)
    return failed


def tail(log: Path, lines: int = 15) -> list[str]:
    """The last lines of a run's output."""
    return log.read_text(errors="replace").splitlines()[-lines:] if log.exists() else []


def _start(run: PlannedRun, workdir: Path, slot: set[int], module: str, lock: int) -> _Process:
    folder = workdir / run.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "failed.json").unlink(missing_ok=True)
    arguments = [sys.executable, "-m", module, f"--config={run.config}", f"--workdir={folder}", *run.overrides]
    environment = os.environ | dict.fromkeys(_THREADS, str(len(slot)))
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "env": environment}
    pinned = hasattr(os, "sched_setaffinity")
    own = os.sched_getaffinity(0) if pinned else set()
    with open(folder / "process.log", "ab") as log:
        # A child starts with its parent's cores; XLA sizes its thread pools by them. Its own session keeps a Ctrl-C on
        # the terminal from reaching it before the sweep has decided what to do.
        if pinned:
            os.sched_setaffinity(0, slot)
        try:
            child = subprocess.Popen(arguments, stdout=log, start_new_session=True, pass_fds=(lock,), **options)
        finally:
            if pinned:
                os.sched_setaffinity(0, own)
    return _Process(run, folder, slot, child)


def _stop(running: Sequence[_Process]) -> None:
    # SIGTERM and not SIGINT: a run that is still importing would lose the latter in some library's bare except.
    for sign, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
        alive = [one.process for one in running if one.process.poll() is None]
        for process in alive:
            os.killpg(process.pid, sign)
        until = time.monotonic() + patience
        try:
            for process in alive:
                process.wait(max(until - time.monotonic(), 0))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue  # a run that does not end, or a second Ctrl-C: kill
        return
