"""Seconds from the start of a run to the end of its first step, and of each program's compilation: 48 layers.

Command:  python -m experiments.performance.first_update [--layers 48]

A narrow mixture of experts with as many layers as Qwen3-30B-A3B, GSPO with R2. Every column is a process of its own:
layers unrolled in training or one body in a scan, each with an empty compilation cache and with what that left.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_BEGAN = time.monotonic()
_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile or load",
}
_FIELDS = {
    "steps": 1,
    "model.hidden_size": 32,
    "model.intermediate_size": 32,
    "model.moe_intermediate_size": 16,
    "model.num_experts": 8,
    "model.num_experts_per_tok": 2,
    "replay.mode": "R2",
    "warm_start.steps": 0,
    "evaluation.prompts": 8,
    "log.diagnostics_every": 0,
}


def child(layers: int, unrolled: bool, folder: Path) -> None:
    """One run in this process; its last line is {"program, phase": seconds} as JSON."""
    import jax

    from jaxrl_llm import main
    from jaxrl_llm.models import kernels
    from jaxrl_llm.records.progress import PROGRAMS

    if unrolled:
        kernels._UNROLLED["cpu"] = layers
    seconds: dict[str, float] = collections.defaultdict(float)

    def listen(event: str, duration_secs: float, **about: Any) -> None:
        if event in _EVENTS:
            name = str(about.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            program = PROGRAMS.get(name, "everything else")
            seconds[f"{program}, {_EVENTS[event]}"] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    fields = _FIELDS | {"model.num_hidden_layers": layers}
    given = [f"--config.{key}={value}" for key, value in fields.items()]
    if main.main(["--config", "gspo:smoke", "--workdir", str(folder), *given]):
        raise SystemExit("the run failed")
    print(json.dumps(seconds | {"start to end of the first step": time.monotonic() - _BEGAN}))


def measure(layers: int) -> dict[str, dict[str, float]]:
    """{column: seconds by row}."""
    out = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("unrolled", "scan"):
            env = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{scratch}/{name}", "JAX_PLATFORMS": "cpu"}
            for cache in ("empty", "filled"):
                own = ["--child", name, "--layers", str(layers), "--folder", f"{scratch}/{name}_{cache}"]
                command = [sys.executable, "-m", "experiments.performance.first_update", *own]
                told = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
                out[f"{name}, {cache} cache"] = json.loads(told.splitlines()[-1])
    return out


def table(measured: dict[str, dict[str, float]]) -> str:
    rows = sorted(
        {row for column in measured.values() for row in column}, key=lambda row: (row.startswith("start"), row)
    )
    lines = [f"| seconds | {' | '.join(measured)} |", "|---" * (len(measured) + 1) + "|"]
    for row in rows:
        shown = [f"{column.get(row, 0.0):.1f}" for column in measured.values()]
        lines.append(f"| {row} | {' | '.join(shown)} |")
    return "\n".join(lines)


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--child", choices=("unrolled", "scan"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.layers, given.child == "unrolled", given.folder)
    else:
        print(table(measure(given.layers)))


if __name__ == "__main__":
    run()
