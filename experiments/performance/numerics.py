"""Cost of exact numerics: steps of one workload under fast and exact, turn by turn in one process, CPU seconds.

python -m experiments.performance.numerics --workload S --json OUT.json [--dtypes float32,bfloat16] [--rows 32]
    [--repeats 3]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from experiments.performance import workload as workloads
from experiments.performance.ours import Options, System, timed_step
from jaxrl_llm.config import start_up
from jaxrl_llm.models.exact import tiles

_PARTS = ("rollout_cpu_s", "train_cpu_s")


def measure(workload: Any, dtype: str, repeats: int) -> dict[str, Any]:
    """The best of so many steps of each, and exact over fast."""
    systems = {name: System(workload, Options(dtype=dtype, numerics=name)) for name in ("fast", "exact")}
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for step in range(repeats + 1):  # the first one compiles
        for name, system in systems.items():
            steps[name].append(timed_step(system, step))
    best = {name: {part: min(one[part] for one in of[1:]) for part in _PARTS} for name, of in steps.items()}
    whole = {name: sum(of.values()) for name, of in best.items()}
    ratios = {part: best["exact"][part] / best["fast"][part] for part in _PARTS}
    return {"dtype": dtype, "rows": tiles.ROWS, **best, "ratio": {**ratios, "step": whole["exact"] / whole["fast"]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="S", help="S, M or a JSON file with the fields of a workload")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rows", type=int, default=tiles.ROWS, help="tokens of a tile")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    start_up.start_jax()
    tiles.ROWS = arguments.rows
    workload, found = workloads.load(arguments.workload), []
    print("dtype     rows  rollout: fast s  exact  ratio   train: fast s  exact  ratio   step", flush=True)
    for dtype in arguments.dtypes.split(","):
        one = measure(workload, dtype, arguments.repeats)
        found.append(one)
        fast, exact, ratio = one["fast"], one["exact"], one["ratio"]
        cells = [f"{dtype:9} {tiles.ROWS:4}"]
        cells += [f"{fast[part]:15.2f} {exact[part]:6.2f} {ratio[part]:6.2f}" for part in _PARTS]
        print(" ".join(cells), f"{ratio['step']:6.2f}", flush=True)
    arguments.json.write_text(json.dumps({"workload": vars(workload), "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
