"""How the timed programs take turns on one core: each is a process that waits for a line before every step.

A runner calls `Turns.begin` before a step and `Turns.end` with its figures after it; the driver (`Runner`) starts the
processes on one core and lets one of them run at a time, so that drift of the machine affects all of them equally.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Runner", "Turns", "check_room", "summary"]

_MARK = "@turn "
_MEMORY = Path("/proc/meminfo")
ROOT = Path(__file__).parents[2]
_LESS = "end other programs, or give a smaller --workload or fewer --peers"
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def check_room(name: str, needed_mb: float) -> None:
    """Refuse to start a program that does not fit into memory: the system would kill it, or another one.

    Raises:
      RuntimeError: less memory is free than it needs (only where /proc/meminfo exists).
    """
    if not _MEMORY.exists():
        return
    fields = dict(line.split(":") for line in _MEMORY.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) / 1024
    if free < needed_mb:
        raise RuntimeError(f"{name} needs about {needed_mb:.0f} MB and {free:.0f} MB are free; {_LESS}")


class Turns:
    """The runner's side. Standard output stays free for what libraries print; only marked lines are read."""

    def begin(self) -> None:
        if not sys.stdin.readline():
            sys.exit(0)

    def end(self, **figures: float) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(_MARK + json.dumps({"peak_rss_mb": peak} | figures), flush=True)


class Runner:
    """One timed process, pinned to `core`; it ends with the `with` block."""

    def __init__(self, name: str, command: Sequence[str], core: int | None, environment: Mapping[str, str], log: Path):
        threads = dict.fromkeys(_ONE_THREAD, "1") if core is not None else {}
        pin = None if core is None else lambda: os.sched_setaffinity(0, {core})
        self._log = log.open("w")
        self._name, self._path = name, log
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=dict(os.environ) | threads | dict(environment),
            preexec_fn=pin,
        )

    def step(self) -> dict[str, Any]:
        """Run one step; returns its figures.

        Raises:
          RuntimeError: it ended; the message holds the end of its log.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: the empty read below says so
            print("go", file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
            self._log.write(line)
        self._log.flush()
        tail, code = "\n".join(self._path.read_text().splitlines()[-15:]), self._process.wait()
        if code == -signal.SIGKILL:
            raise RuntimeError(f"{self._name} was killed, as the system does when memory runs out; {_LESS}")
        raise RuntimeError(f"{self._name} ended with code {code}; its log ends:\n{tail}")

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


def summary(steps: Sequence[Mapping[str, float]], tokens: int) -> dict[str, Any]:
    """The figures of a system: CPU seconds of the best step after the first; compile_s is what the first took more."""
    rollout, train = (min(step[name] for step in steps[1:]) for name in ("rollout_cpu_s", "train_cpu_s"))
    return {
        "rollout_cpu_s": rollout,
        "rollout_tokens_per_cpu_s": tokens / rollout,
        "train_cpu_s": train,
        "peak_rss_mb": max(step["peak_rss_mb"] for step in steps),
        "compile_s": max(0.0, steps[0]["rollout_cpu_s"] + steps[0]["train_cpu_s"] - rollout - train),
        "first_step_s": steps[0]["wall_s"],
        "steps": [dict(step) for step in steps],
    }
