"""A run so small that it starts in seconds, in a process of its own that says what it is doing."""

import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.main import main
from jaxrl_llm.records.run_log import read_rows
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.training.step import Learner

__all__ = ["STEPS", "Child", "arguments", "fields", "outcome", "write"]

STEPS = 8
PHASES = ("elsewhere", "rollout", "update")
_CLOCK = ("time/", "rollout/tokens_per_s")


def fields(folder: Path) -> dict[str, Any]:
    """DAPO on sorting three digits, a change of dapo:smoke, with data and warm start in `folder`."""
    return {
        "steps": STEPS,
        "task.data_dir": folder / "data",
        "warm_start.cache_dir": folder / "cache",
        "warm_start.steps": 40,
        "dynamic_sampling.max_draws": 2,
        "evaluation.every": 4,
        "checkpoint.every": 1,
        "checkpoint.keep": 2,
    }


def arguments(folder: Path, workdir: Path, **changes: Any) -> list[str]:
    """The command line of that run."""
    given = [f"--config.{name}={value}" for name, value in (fields(folder) | changes).items()]
    return ["--config=dapo:smoke", f"--workdir={workdir}", *given]


class Child:
    """`jaxrl_llm.main` in a fork of a process that has imported everything and computed nothing.

    phase: what it is doing, of `PHASES`; entered: how often it has begun a phase. Both outlive a SIGKILL.
    compiled: a file that gets a line [updates so far, function] for every program that is compiled.
    """

    _context = multiprocessing.get_context("forkserver")

    def __init__(self, given: list[str], output: Path, compiled: Path | None = None):
        self._context.set_forkserver_preload([__name__])
        self.output = output
        self._phase = self._context.Value("i", 0, lock=False)
        self._entered = self._context.Array("i", len(PHASES), lock=False)
        self.process: BaseProcess = self._context.Process(
            target=_run, args=(given, str(output), compiled and str(compiled), self._phase, self._entered)
        )
        self.process.start()

    @property
    def phase(self) -> str:
        return PHASES[self._phase.value]

    def entered(self, phase: str) -> int:
        return self._entered[PHASES.index(phase)]

    def printed(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait(self, until: Callable[[], bool] = lambda: False) -> bool:
        """Until something holds; False when the process has ended before."""
        while not until():
            if not self.process.is_alive():
                return False
            time.sleep(0.001)
        return True

    def kill(self) -> bool:
        """SIGKILL; False when it had ended by itself."""
        self.process.kill()
        self.process.join()
        return self.process.exitcode == -9

    def finish(self) -> int:
        self.process.join()
        return int(self.process.exitcode or 0)


def _run(given: list[str], output: str, compiled: str | None, phase: Any, entered: Any) -> None:
    with open(output, "wb", 0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for owner, name, number in ((Engine, "generate", 1), (Learner, "update", 2)):
        setattr(owner, name, _announced(getattr(owner, name), number, phase, entered))
    if compiled:
        file = open(compiled, "w", buffering=1)

        def note(event: str, duration_secs: float, **about: Any) -> None:
            if event == "/jax/core/compile/backend_compile_duration":
                file.write(json.dumps([entered[2], about.get("fun_name", "")]) + "\n")

        jax.monitoring.register_event_duration_secs_listener(note)
    code = main(given)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def _announced(original: Any, number: int, phase: Any, entered: Any) -> Any:
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        phase.value = number
        entered[number] += 1
        try:
            return original(self, *args, **keywords)
        finally:
            phase.value = 0

    return call


def outcome(workdir: Path) -> dict[str, Any]:
    """Return what must be the same whatever happened on the way: rows, samples, result and the digests of the state."""
    rows = [
        {name: value for name, value in row.items() if not name.startswith(_CLOCK)}
        for row in read_rows(workdir / "metrics.jsonl")
    ]
    newest = max((workdir / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    return {
        "rows": rows,
        "samples": read_rows(workdir / "samples.jsonl"),
        "result": json.loads((workdir / "result.json").read_text()),
        "step": newest.name,
        "digests": json.loads((newest / "payload" / "metadata").read_text())["digests"],
    }


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def seconds(rng: random.Random, most: float) -> None:
    """Sleep for a random time."""
    time.sleep(rng.uniform(0, most))
