"""python -m experiments.robustness.soak [--steps 1000] [--checkpoints 25]: what a long run gains in memory and files.

DAPO with dynamic sampling, evaluations and checkpoints, and a verifier in worker processes. Once a second its resident
memory, threads, open files and children are read from /proc; JAX tells of every compilation. What counts is the last
three quarters: memory grows by the slope of a line through it, the others are compared at its two ends.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from experiments.robustness.small import Child, arguments, write
from jaxrl_llm.records.run_log import read_rows

_RESULTS = Path(__file__).parent / "results"
_MOST_GROWTH = 2.0  # kB of resident memory a step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoints", type=int, default=25, help="steps between checkpoints")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        readings = _observed(folder, given.steps, given.checkpoints)
        compiled = [json.loads(line) for line in (folder / "compiled.jsonl").read_text().splitlines()]
    record = {"steps": given.steps, "checkpoints_every": given.checkpoints} | summary(readings, compiled, given.steps)
    write(_RESULTS / f"soak_{given.checkpoints}.json", record | {"readings": readings[:: max(1, len(readings) // 100)]})
    print(json.dumps(record, indent=1))
    flat = record["growth_kb_a_step"] <= _MOST_GROWTH
    return 0 if flat and not record["compiled_late"] and not any(record["gained"].values()) else 1


def summary(readings: list[dict[str, float]], compiled: list[tuple[int, str]], steps: int) -> dict[str, Any]:
    """readings: of every second; compiled: (updates so far, function), with two updates a step."""
    late = [reading for reading in readings if reading["step"] > steps / 4]
    at = np.array([reading["step"] for reading in late])
    memory = np.array([reading["memory_mb"] for reading in late])
    tenth = max(1, len(late) // 10)

    def typical(name: str, part: list[dict[str, float]]) -> int:
        """The most frequent count: a thread or file of a moment does not matter."""
        return int(np.bincount([int(reading[name]) for reading in part]).argmax())

    gained = {
        name: typical(name, late[-tenth:]) - typical(name, late[:tenth]) for name in ("threads", "files", "children")
    }
    return {
        "memory_mb": [round(float(memory[:tenth].mean()), 1), round(float(memory[-tenth:].mean()), 1)],
        "growth_kb_a_step": round(float(np.polyfit(at, memory, 1)[0]) * 1000, 3),
        "gained": gained,
        "programs": len(compiled),
        "compiled_late": [name for updates, name in compiled if updates > 2 * steps / 4],
        "seconds": round(readings[-1]["seconds"]),
    }


def _observed(folder: Path, steps: int, every: int) -> list[dict[str, float]]:
    """Run it, and read it once a second."""
    questions = ({"prompt": f"{a}{b}{c}=", "answer": "".join(sorted(f"{a}{b}{c}"))} for a, b, c in _digits())
    (folder / "sort.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    changes = {
        "steps": steps,
        "task.name": "jsonl",
        "task.options.path": folder / "sort.jsonl",
        "task.options.verifier": "jaxrl_llm.tasks.verifiers:exact",
        # ... named like a user's own, so in worker processes
        "task.options.prompt_length": 4,
        "task.options.answer_length": 4,
        "warm_start.steps": 60,
        "evaluation.every": 50,
        "checkpoint.every": every,
    }
    child = Child(arguments(folder, folder / "run", **changes), folder / "run.txt", folder / "compiled.jsonl")
    process, began, readings = psutil.Process(child.process.pid), time.monotonic(), []
    while child.process.is_alive():
        rows = read_rows(folder / "run" / "metrics.jsonl")
        try:
            reading = {
                "step": float(rows[-1]["step"] if rows else 0),
                "memory_mb": process.memory_info().rss / 1e6,
                "threads": process.num_threads(),
                "files": process.num_fds(),
                "children": len(process.children(recursive=True)),
                "seconds": time.monotonic() - began,
            }
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            break
        readings.append({name: round(value, 3) for name, value in reading.items()})
        time.sleep(1)
    assert child.finish() == 0, child.printed()[-3000:]
    return [reading for reading in readings if reading["step"] and reading["memory_mb"]]  # none of a process that ended


def _digits() -> Any:
    return itertools.product("0123456789", repeat=3)


if __name__ == "__main__":
    sys.exit(main())
