"""Times a rollout and a training step of jaxrl_llm and of its peers on the same work.

python -m experiments.performance.bench --workload S --json OUT.json [--peers trl,tunix|none] [--repeats 3]

Each peer is run separately against ours, so that at most two systems are in memory. The two are processes on one core
that take turns step by step; a figure is the CPU seconds of the best step after the first. The floor is 6 x active
parameters x tokens at this core's own float32 matrix rate.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from experiments.performance import workload as workloads
from experiments.performance.environments import PEERS, python_of
from experiments.performance.turns import ROOT, Runner, check_room, summary
from experiments.performance.workload import Workload

__all__ = ["compare", "measure", "table"]

_MEMORY_OF = {"trl": 1.3, "tunix": 4.5}  # a peer's peak as a multiple of ours, a little above what the README has


def measure(
    systems: Mapping[str, tuple[Workload, Sequence[str]]],
    repeats: int,
    core: int | None,
    memory: Mapping[str, float] | None = None,
) -> dict[str, dict[str, Any]]:
    """Run each command on its workload for 1 + repeats steps, turn by turn; returns the figures by name.

    Args:
      memory: of some systems, their peak as a multiple of the first system's, which must be free when they start.

    Raises:
      ValueError: repeats < 1 (the first step compiles).
      RuntimeError: a command ended (the message holds the end of its log), or memory is short.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1, the first step compiles; set --repeats")
    environment = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # an empty cache at every start
        "XLA_FLAGS": "",
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        runners: dict[str, Runner] = {}
        steps: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
        for turn in range(1 + repeats):
            for place, (name, (workload, command)) in enumerate(systems.items()):
                if turn == 0:
                    if memory and name in memory:
                        check_room(name, memory[name] * next(iter(steps.values()))[0]["peak_rss_mb"])
                    path = Path(folder) / f"{place}.json"
                    path.write_text(json.dumps(vars(workload)))
                    log, line = path.with_suffix(".log"), [*command, "--workload", str(path)]
                    runners[name] = stack.enter_context(Runner(name, line, core, environment, log))
                steps[name].append(runners[name].step())
                print(f"{name} {turn}: {_short(steps[name][-1])}", file=sys.stderr, flush=True)
    return {name: summary(taken, systems[name][0].answer_tokens()) for name, taken in steps.items()}


def _short(step: Mapping[str, float]) -> str:
    return f"rollout {step['rollout_cpu_s']:.2f} s, train {step['train_cpu_s']:.2f} s"


def compare(workload: Workload, peers: Sequence[str], repeats: int, core: int | None) -> dict[str, Any]:
    """Everything that goes into the JSON: ours at the top, the peers, how much faster we are, and the floor.

    Ours runs again with each peer, which is compared with that run; ours at the top is the first run.

    Raises:
      RuntimeError: a system ended, or a peer needs more memory than is free.
    """
    own = [sys.executable, "-m", "experiments.performance.ours"]
    commands = {peer: [python_of(peer), "-m", f"experiments.performance.peer_{peer}"] for peer in peers}
    rate = workloads.gemm_gflops()
    runs: list[dict[str, Any]] = []
    for peer, command in commands.items():
        systems = {"ours": (workload, own), peer: (workload, command)}
        runs.append(measure(systems, repeats, core, {peer: _MEMORY_OF[peer]}))
    ours = (runs or [measure({"ours": (workload, own)}, repeats, core)])[0]["ours"]
    floor = workload.train_flops() / rate / 1e9
    return {
        "workload": vars(workload),
        "parameters": workload.parameters,
        "active_parameters": workload.active_parameters,
        **ours,
        "peers": {peer: run[peer] for peer, run in zip(commands, runs, strict=True)},
        "ratios": {peer: _ratios(run[peer], run["ours"]) for peer, run in zip(commands, runs, strict=True)},
        "floor": {"train_cpu_s": floor, "gemm_gflops": rate, "train_times_floor": ours["train_cpu_s"] / floor},
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
    }


def _ratios(theirs: Mapping[str, float], ours: Mapping[str, float]) -> dict[str, float]:
    figures = {"rollout": "rollout_cpu_s", "train": "train_cpu_s", "memory": "peak_rss_mb"}
    return {name: theirs[figure] / ours[figure] for name, figure in figures.items()}


def table(result: Mapping[str, Any]) -> str:
    """Markdown: one row a system, how much slower than ours in brackets, and the floor."""
    head = "| system | rollout CPU s | tokens / CPU s | train CPU s | peak MB | compile s |\n|---|---|---|---|---|---|"
    rows = [head, _row("jaxrl_llm", result, None)]
    rows += [_row(peer, figures, result["ratios"][peer]) for peer, figures in result["peers"].items()]
    floor = result["floor"]
    rows.append(f"| floor ({floor['gemm_gflops']:.0f} GFLOP/s) | | | {floor['train_cpu_s']:.3f} | | |")
    return "\n".join(rows)


def _row(name: str, figures: Mapping[str, float], ratio: Mapping[str, float] | None) -> str:
    rollout, train, memory = (f" ({ratio[k]:.2f}x)" if ratio else "" for k in ("rollout", "train", "memory"))
    return (
        f"| {name} | {figures['rollout_cpu_s']:.3f}{rollout} | {figures['rollout_tokens_per_cpu_s']:.0f} "
        f"| {figures['train_cpu_s']:.3f}{train} | {figures['peak_rss_mb']:.0f}{memory} | {figures['compile_s']:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="S", help="S, M or a JSON file with the fields of a workload")
    parser.add_argument("--json", help="where the figures go")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated, or none")
    parser.add_argument("--repeats", type=int, default=3, help="steps after the first")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the core that all share")
    arguments = parser.parse_args()
    peers = [] if arguments.peers == "none" else arguments.peers.split(",")
    os.sched_setaffinity(0, {arguments.core})
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        result = compare(workloads.load(arguments.workload), peers, arguments.repeats, arguments.core)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1))
    print(table(result))


if __name__ == "__main__":
    main()
