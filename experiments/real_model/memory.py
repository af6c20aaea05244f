"""What a run of the published model prints that it will need, beside the most that its process held.

    taskset -c 1 python -m experiments.real_model.memory --lengths 512+512 --lora_rank 8 --json OUT.json
    python -m experiments.real_model.memory --table experiments/real_model/results/memory/*.json

The run is `jaxrl_llm.main` with eight padded rows in one micro-batch, float32, an evaluation of 8 prompts before and
after, and a checkpoint at the end. Padded rows have PROMPT + ANSWER columns, also where an answer ends early.
"""

import argparse
import json
import os
import re
import resource
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


def measure(lengths: str, lora_rank: int, steps: int) -> dict[str, Any]:
    """The printed need and the peak of the resident memory, bytes."""
    fields = [*longer(lengths), ("steps", steps), ("lora.rank", lora_rank), ("evaluation.prompts", 8)]
    fields += [("updates.layout", "padded"), ("updates.minibatches", 1)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxrl_llm.main", "--config", CONFIG, "--workdir", f"{folder}/run"]
        command += [f"--config.{name}={value}" for name, value in fields]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the run ended with code {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    need, peak = printed(done.stdout + done.stderr), 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {"lengths": lengths, "lora_rank": lora_rank, "steps": steps, "printed": need, "peak": peak}


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A line a run, in units of 10^9 bytes, to the three digits that are printed."""
    lines = ["| tokens | trained | printed | peak | printed over peak |", "|---" * 5 + "|"]
    for run in runs:
        trained = f"LoRA, rank {run['lora_rank']}" if run["lora_rank"] else "all parameters"
        sizes = [f"{run[name] / 1e9:.3g}" for name in ("printed", "peak")]
        lines.append(f"| {run['lengths']} | {trained} | {' | '.join(sizes)} | {run['printed'] / run['peak']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="128+96", help="PROMPT+ANSWER tokens")
    parser.add_argument("--lora_rank", type=int, default=0, help="of adapters on every matrix; 0: all is trained")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--table", type=Path, nargs="+", help="results to describe instead of a run")
    given = parser.parse_args()
    if given.table:
        print(table([json.loads(path.read_text()) for path in given.table]))
        return
    run = measure(given.lengths, given.lora_rank, given.steps)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(run) + "\n")
    print(table([run]))


if __name__ == "__main__":
    main()
