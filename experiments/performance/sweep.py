"""Costs of a rollout and of a training step as one property of the workload varies.

python -m experiments.performance.sweep experts|vocabulary|lengths|replay|all --json OUT.json [--workload S]

experts     8 to 64 experts at the same k and active parameters
vocabulary  2^10 to 2^15 tokens
lengths     answers of one length; lognormal ones (ten times between median and longest) waited for, refilled and packed
replay      routing neither recorded nor replayed, recorded, replayed by the update (R3)
The settings of one sweep are interleaved like the systems of the benchmark.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.performance import workload as workloads
from experiments.performance.bench import measure
from experiments.performance.workload import Workload

__all__ = ["SWEEPS", "points"]

Point = tuple[Workload, tuple[str, ...]]  # a workload and the options of `ours`


def _experts(w: Workload) -> dict[str, Point]:
    return {f"E={e}": (dataclasses.replace(w, E=e), ()) for e in (8, 16, 32, 64) if e >= w.k}


def _vocabulary(w: Workload) -> dict[str, Point]:
    return {f"V={v}": (dataclasses.replace(w, V=v), ()) for v in (1024, 4096, 16384, 32768)}


def _lengths(w: Workload) -> dict[str, Point]:
    spread = dataclasses.replace(w, lengths="lognormal", C=max(w.C, 320), NP=w.NP * 4)
    slots, micro = str(spread.rows // 4), ("--micro_batch_rows", "32")
    return {
        "all of one length": (dataclasses.replace(spread, lengths=None, C=max(1, round(_mean(spread)))), micro),
        "lognormal, waits for the longest": (spread, ("--slots", "0", *micro)),
        "lognormal, slots refilled": (spread, ("--slots", slots, *micro)),
        "lognormal, slots refilled, packed": (spread, ("--slots", slots, "--layout", "packed", *micro)),
    }


def _mean(w: Workload) -> float:
    return w.answer_tokens() / w.rows


def _replay(w: Workload) -> dict[str, Point]:
    return {
        "neither": (w, ("--record_routing", "False")),
        "recorded": (w, ()),
        "recorded and replayed (R3)": (w, ("--replay", "R3")),
    }


SWEEPS = {"experts": _experts, "vocabulary": _vocabulary, "lengths": _lengths, "replay": _replay}


def points(name: str, workload: Workload) -> dict[str, Point]:
    """The settings of a sweep by label.

    Raises:
      ValueError: unknown sweep.
    """
    if name not in SWEEPS:
        raise ValueError(f"sweep={name!r} is not one of {', '.join(SWEEPS)}, all")
    return SWEEPS[name](workload)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown; in brackets the time against the first row."""
    first = next(iter(results.values()))
    rows = ["| setting | rollout CPU s | tokens / CPU s | scoring CPU s | train CPU s | peak MB |", "|---" * 6 + "|"]
    for label, f in results.items():
        score = min(step["score_cpu_s"] for step in f["steps"][1:])
        rows.append(
            f"| {label} | {f['rollout_cpu_s']:.3f} ({f['rollout_cpu_s'] / first['rollout_cpu_s']:.2f}x) "
            f"| {f['rollout_tokens_per_cpu_s']:.0f} | {score:.3f} "
            f"| {f['train_cpu_s']:.3f} ({f['train_cpu_s'] / first['train_cpu_s']:.2f}x) | {f['peak_rss_mb']:.0f} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", help="experts, vocabulary, lengths, replay or all")
    parser.add_argument("--workload", default="S")
    parser.add_argument("--json", help="where the figures go")
    parser.add_argument("--repeats", type=int, default=2, help="steps after the first")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    command = (sys.executable, "-m", "experiments.performance.ours")
    results = {}
    try:
        base = workloads.load(arguments.workload)
        for name in SWEEPS if arguments.sweep == "all" else [arguments.sweep]:
            systems = {label: (w, [*command, *options]) for label, (w, options) in points(name, base).items()}
            results[name] = measure(systems, arguments.repeats, arguments.core)
            print(f"\n## {name}\n\n{table(results[name])}", flush=True)
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(results, indent=1))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
