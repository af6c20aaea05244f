"""Start the runs of a sweep: as processes on this machine within a budget of cores, or as jobs of a scheduler."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.ground.machine import usable_cores
from jaxrl_llm.ground.signals import ending_signals
from jaxrl_llm.records.run_log import read_rows, write_json
from jaxrl_llm.sweep.planned import PlannedRun

_GRACE = 120.0  # seconds that a run has to save its state after an interrupt, before it is killed
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def core_slots(cores: int | None, cores_per_run: int) -> list[set[int]]:
    """Disjoint sets of cores, each for one run at a time; all have one size, because other core counts give other bits.

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


def run_locally(
    runs: Sequence[PlannedRun], workdir: Path, *, slots: Sequence[set[int]], module: str, lock: int
) -> list[PlannedRun]:
    """Run all of them in this order, at most one in each of the `core_slots`; return those that failed.

    A run that fails leaves failed.json and its output in process.log, and the others go on. On Ctrl-C, SIGTERM or the
    end of the terminal the runs are interrupted, so that they save their state, and killed if they do not end; then
    KeyboardInterrupt goes on.

    Args:
        lock: file descriptor of the sweep's lock. The runs inherit it: if the sweep is killed outright they keep the
            lock, and a second sweep is refused until they are gone.
    """
    waiting, running, failed, minutes = list(runs), [], [], []
    say = functools.partial(print, flush=True)
    previous = {number: signal.signal(number, signal.default_int_handler) for number in ending_signals()}
    warm = False
    try:
        while waiting or running:
            # The first run is alone until it logs an update: then the others find every program in warm caches.
            logged = (row for one in running for row in read_rows(one.folder / "metrics.jsonl"))
            warm = warm or bool(minutes or failed) or any(row["step"] > 0 for row in logged)
            free = [slot for slot in slots if all(process.slot != slot for process in running)]
            for slot in free[: None if warm else 1 - len(running)]:
                if waiting:
                    running.append(_start(waiting.pop(0), workdir, slot, module, lock))
                    say(f"start   {running[-1].run}")
            time.sleep(0.1)
            for process in [one for one in running if one.process.poll() is not None]:
                running.remove(process)
                took = (time.monotonic() - process.began) / 60
                code = process.process.returncode
                if code == 0:
                    minutes.append(took)
                    left = sum(minutes) / len(minutes) * (len(waiting) + len(running)) / len(slots)
                    say(f"done    {process.run}  ({took:.1f} min; about {left:.0f} min left)")
                else:
                    failed.append(process.run)
                    say(f"FAILED  {process.run}  (exit code {code})")
                    last = tail(process.folder / "process.log") or [""]
                    write_json(process.folder / "failed.json", {"exit_code": code, "last_line": last[-1]})
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # the terminal may be gone
            say(f"interrupted: stopping {len(running)} runs; the same command goes on from here")
        raise
    finally:
        _stop(running)
        for number, handler in previous.items():
            signal.signal(number, handler)
    return failed


def tail(log: Path, lines: int = 15) -> list[str]:
    """The last lines of a run's output; none if there is no log."""
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
        # A child starts with its parent's cores, and XLA sizes its thread pools by them. In its own session a Ctrl-C on
        # the terminal does not reach it before the sweep has decided what to do.
        if pinned:
            os.sched_setaffinity(0, slot)
        try:
            child = subprocess.Popen(arguments, stdout=log, start_new_session=True, pass_fds=(lock,), **options)
        finally:
            if pinned:
                os.sched_setaffinity(0, own)
    return _Process(run, folder, slot, child)


def _stop(running: Sequence[_Process]) -> None:
    # Not SIGINT: while a run is still importing, some library's bare except would swallow it.
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


def check_scheduler(cluster: str | None) -> None:
    """Raises ValueError unless submitit can submit to `cluster` here; None: to a scheduler of this machine.

    Without one submitit would start all jobs at once on this machine. To ask an executor itself would write folders.

    Raises:
        ModuleNotFoundError: submitit is not installed.
    """
    here = {name: executor.affinity() for name, executor in _submitit().core.plugins.get_executors().items()}
    scheduled = max(here.values()) > 1 if cluster is None else here.get(cluster, -1) >= 0
    if not scheduled:
        which = "scheduler" if cluster is None else f"--cluster={cluster}"
        raise ValueError(
            f"--launcher=submitit finds no {which} on this machine; give the command where SLURM's srun and sbatch "
            "are, or --launcher=local"
        )


def submit(lines: Sequence[str], workdir: Path, cluster: str | None, *, cores: int, minutes: float) -> list[Any]:
    """Submit one job a shell line as an array, through the optional dependency submitit; return the jobs.

    A job may take three times the expected `minutes` of a run. Logs of the scheduler go to `submitit` in `workdir`.

    Raises:
        ModuleNotFoundError: submitit is not installed.
    """
    submitit = _submitit()
    executor = submitit.AutoExecutor(folder=workdir / "submitit", cluster=cluster)
    executor.update_parameters(timeout_min=max(int(3 * minutes), 10), cpus_per_task=cores, name="jaxrl_llm")
    with executor.batch():
        return [executor.submit(submitit.helpers.CommandFunction(["bash", "-c", line])) for line in lines]


def _submitit() -> Any:
    try:
        import submitit
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("launcher=submitit needs submitit; install jaxrl_llm[cluster]") from error
    return submitit
