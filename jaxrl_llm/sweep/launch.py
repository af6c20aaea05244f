"""Start the runs of a sweep: in processes on this machine within a budget of cores, or as jobs of a scheduler."""

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.ground.machine import usable_cores
from jaxrl_llm.ground.signals import interruptible
from jaxrl_llm.records.run_log import read_rows, write_json
from jaxrl_llm.sweep.planned import PlannedRun

_GRACE = 120.0  # seconds that runs have to save their states after an interrupt, before they are killed
_STOPPING = "stopping the runs once they have saved; again ends them now"
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
class _Worker:
    """A process pinned to its cores, which takes run after run (`worker.py`)."""

    process: subprocess.Popen[bytes]
    run: PlannedRun | None = None
    began: float = 0.0

    def take(self, run: PlannedRun, workdir: Path) -> None:
        self.run, self.began, folder = run, time.monotonic(), workdir / run.folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failed.json").unlink(missing_ok=True)
        arguments = [f"--config={run.config}", f"--workdir={folder}", *run.overrides]
        line = json.dumps({"arguments": arguments, "log": str(folder / "process.log")})
        assert self.process.stdin is not None, "a pipe"
        with contextlib.suppress(BrokenPipeError):  # it has died, as its exit code will say
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def exit_code(self) -> int | None:
        """That of its run, or of the process if it died; None while the run goes on."""
        assert self.process.stdout is not None, "a pipe"
        if select.select([self.process.stdout], [], [], 0)[0] and (answer := self.process.stdout.readline()):
            return int(answer)
        return self.process.poll()

    def kill(self) -> None:
        """End the process and what it has started in its session, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def run_locally(
    runs: Sequence[PlannedRun], workdir: Path, *, slots: Sequence[set[int]], module: str, lock: int
) -> list[PlannedRun]:
    """Run all of them in this order, at most one in each of the `core_slots`; return those that failed.

    The runs of a slot share a process, and so its compiled programs, until one fails. That one leaves failed.json and
    its output in process.log, and the others go on. On Ctrl-C, SIGTERM or the end of the terminal the runs are
    interrupted, so that they save their state, and killed if they do not end, or by a second signal.

    Args:
        lock: file descriptor of the sweep's lock. The runs inherit it: if the sweep is killed outright they keep the
            lock, and a second sweep is refused until they are gone.

    Raises:
        KeyboardInterrupt: a signal has stopped the runs.
    """

    def kill() -> None:
        for worker in list(workers.values()):
            worker.kill()

    waiting, failed, minutes = list(runs), [], []
    workers: dict[int, _Worker] = {}  # by the place of their cores in `slots`
    say = functools.partial(print, flush=True)
    warm = False
    with contextlib.ExitStack() as stack:
        interrupted = stack.enter_context(interruptible(lambda: _STOPPING, kill))
        stack.callback(lambda: _stop(workers.values()))
        while waiting or _running(workers):
            if interrupted():
                raise KeyboardInterrupt("interrupted: the same command goes on from here")
            # The first run is alone until it logs an update: then the others find every program in warm caches.
            running = _running(workers)
            logged = (row for _, run in running.values() for row in read_rows(workdir / run.folder / "metrics.jsonl"))
            warm = warm or bool(minutes or failed) or any(row["step"] > 0 for row in logged)
            free = [place for place in range(len(slots)) if place not in running]
            for place in free[: None if warm else 1 - len(running)]:
                if waiting:
                    if place not in workers:
                        workers[place] = _start(slots[place], module, lock)
                    workers[place].take(waiting[0], workdir)
                    say(f"start   {waiting.pop(0)}")
            time.sleep(0.1)
            for place, (worker, run) in _running(workers).items():
                code = worker.exit_code()
                if code is None:
                    continue
                worker.run, took = None, (time.monotonic() - worker.began) / 60
                if code == 0:
                    minutes.append(took)
                    left = sum(minutes) / len(minutes) * (len(waiting) + len(_running(workers))) / len(slots)
                    say(f"done    {run}  ({took:.1f} min; about {left:.0f} min left)")
                else:  # nobody knows what state a failure leaves a process in: the next run gets a new one
                    _stop([workers.pop(place)])
                    failed.append(run)
                    say(f"FAILED  {run}  (exit code {code})")
                    folder = workdir / run.folder
                    last = tail(folder / "process.log") or [""]
                    write_json(folder / "failed.json", {"exit_code": code, "last_line": last[-1]})
    return failed


def tail(log: Path, lines: int = 15) -> list[str]:
    """The last lines of a run's output; none if there is no log."""
    return log.read_text(errors="replace").splitlines()[-lines:] if log.exists() else []


def _running(workers: Mapping[int, _Worker]) -> dict[int, tuple[_Worker, PlannedRun]]:
    return {place: (worker, worker.run) for place, worker in workers.items() if worker.run is not None}


def _start(slot: set[int], module: str, lock: int) -> _Worker:
    environment = os.environ | dict.fromkeys(_THREADS, str(len(slot)))
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0, "env": environment}
    pinned = hasattr(os, "sched_setaffinity")
    own = os.sched_getaffinity(0) if pinned else set()
    # A child starts with its parent's cores, and XLA sizes its thread pools by them. In its own session a Ctrl-C on the
    # terminal does not reach it before the sweep has decided what to do.
    if pinned:
        os.sched_setaffinity(0, slot)
    try:
        command = [sys.executable, "-m", "jaxrl_llm.sweep.worker", module]
        process: Any = subprocess.Popen(command, start_new_session=True, pass_fds=(lock,), **options)
        return _Worker(process)
    finally:
        if pinned:
            os.sched_setaffinity(0, own)


def _stop(workers: Iterable[_Worker]) -> None:
    """End them, and their runs when they have saved their state."""
    workers, until = list(workers), time.monotonic() + _GRACE
    for worker in workers:
        assert worker.process.stdin is not None, "a pipe"
        worker.process.stdin.close()
        if worker.run and worker.process.poll() is None:
            # Not SIGINT: while a run is still importing, some library's bare except would swallow it.
            os.killpg(worker.process.pid, signal.SIGTERM)
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # or a second Ctrl-C: kill
            worker.process.wait(max(until - time.monotonic(), 0))
        if worker.process.poll() is None:
            worker.kill()
        worker.process.wait()
        assert worker.process.stdout is not None, "a pipe"
        worker.process.stdout.close()


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
