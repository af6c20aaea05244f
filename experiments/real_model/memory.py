"""Memory that a run of the published model announces, beside the most that its process held.

    taskset -c 1 python -m experiments.real_model.memory --lengths 512+512 --lora_rank 8 --json OUT.json
    taskset -c 1 python -m experiments.real_model.memory --lengths sums --resumed --json OUT.json
    python -m experiments.real_model.memory --table experiments/real_model/results/memory/*.json

The run is `jaxrl_llm.main` with eight padded rows in one micro-batch, float32, an evaluation of 8 prompts before and
after, and a checkpoint after every step, so that the next step runs while one is written. Padded rows have
PROMPT + ANSWER columns, also where an answer ends early. `sums` is the config with these checkpoints.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.performance.turns import ROOT
from experiments.real_model.compare import CONFIG, longer

__all__ = ["printed", "table"]

_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def printed(output: str) -> float:
    """Bytes that the run says it needs: the first number of its line `memory`."""
    found = re.search(r"^memory +([\d.]+) ([kMGT]B)", output, re.MULTILINE)
    if found is None:
        raise ValueError(f"no line `memory` with a size in {output[:200]!r}")
    return float(found[1]) * _UNITS[found[2]]


def measure(lengths: str, lora_rank: int, steps: int, resumed: bool = False) -> dict[str, Any]:
    """The printed need and the peak of the resident memory, bytes; resumed: of a run that goes on after `steps`."""
    fields: list[tuple[str, Any]] = [("lora.rank", lora_rank), ("checkpoint.every", 1)]
    if lengths != "sums":
        fields += [("updates.layout", "padded"), ("updates.minibatches", 1), ("evaluation.prompts", 8)]
        fields += longer(lengths)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxrl_llm.main", "--config", CONFIG, "--workdir", f"{folder}/run"]
        command += [f"--config.{name}={value}" for name, value in fields]
        for last in (steps, 2 * steps)[: 1 + resumed]:
            output, peak = _peak([*command, f"--config.steps={last}"], Path(folder) / "output")
    run = {"lengths": lengths, "lora_rank": lora_rank, "steps": steps, "resumed": resumed}
    return run | {"printed": printed(output), "peak": peak}


def _peak(command: Sequence[str], into: Path) -> tuple[str, int]:
    """Return what a command printed, and the most bytes that its process held."""
    with into.open("w") as output:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        started = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(started.pid, 0)
    if status:
        raise RuntimeError(f"the run ended with code {os.waitstatus_to_exitcode(status)}:\n{into.read_text()[-2000:]}")
    return into.read_text(), 1024 * usage.ru_maxrss


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A line a run, in units of 10^9 bytes, to the three digits that are printed."""
    lines = ["| tokens | trained | printed | peak | printed over peak |", "|---" * 5 + "|"]
    for run in runs:
        trained = f"LoRA, rank {run['lora_rank']}" if run["lora_rank"] else "all parameters"
        trained += ", resumed" * run.get("resumed", False)
        sizes = [f"{run[name] / 1e9:.3g}" for name in ("printed", "peak")]
        lines.append(f"| {run['lengths']} | {trained} | {' | '.join(sizes)} | {run['printed'] / run['peak']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="128+96", help="PROMPT+ANSWER tokens, or sums")
    parser.add_argument("--lora_rank", type=int, default=0, help="of adapters on every matrix; 0: all is trained")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--resumed", action="store_true", help="measure the run that goes on after these steps")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--table", type=Path, nargs="+", help="results to describe instead of a run")
    given = parser.parse_args()
    if given.table:
        print(table([json.loads(path.read_text()) for path in given.table]))
        return
    run = measure(given.lengths, given.lora_rank, given.steps, given.resumed)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(run) + "\n")
    print(table([run]))


if __name__ == "__main__":
    main()
