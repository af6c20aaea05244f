"""The speedrun: CPU seconds of one core from the warm start to the target, relative to another entry in the same race.

    python -m experiments.speedrun.race --entry experiments/speedrun/entries/gspo.json --core 1 --json OUT.json
    python -m experiments.speedrun.race --table experiments/speedrun/results/*.json

An entry is a JSON file of fields. The entries of a race are processes on one core that take turns rollout by rollout,
so that drift of the machine affects all of them equally; README.md has the rules.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from experiments.performance.turns import ROOT, Runner
from jaxrl_llm.config import loading
from jaxrl_llm.records import checkout
from jaxrl_llm.report.statistics import LEVEL, MINIMUM_SEEDS, PairedDifference, holm, paired_difference
from jaxrl_llm.run import settings

CONFIG = "configs/routing_replay.py"
BASELINE = Path(__file__).parent / "entries" / "baseline.json"
TARGET = 0.90  # of the sampled answers to the held-out prompts, in two evaluations in a row
ROLLOUTS = 60  # an entry that has not arrived by then has not arrived
SHARED = ("seed", "steps", "task", "model", "lora", "warm_start", "evaluation", "checkpoint", "mesh", "log")


def fields_of(entry: str | Path) -> dict[str, Any]:
    """The fields that an entry sets.

    Raises:
      ValueError: it is no JSON object, or sets what all entries share.
    """
    try:
        fields = json.loads(Path(entry).read_text())
    except ValueError as error:
        raise ValueError(f"{entry} is no JSON ({error}); write an object of fields") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{entry} holds {fields!r:.60}; write an object of fields, as {BASELINE.name} does")
    for field in fields:
        if field.split(".")[0] in SHARED:
            raise ValueError(f"{entry} sets {field}, which all entries share; leave it out")
    return fields


def settings_of(fields: Mapping[str, Any], seed: int) -> settings.Settings:
    """Settings of an entry's run: the race's config, the entry's fields, the seed. Raises ValueError as `validate`."""
    raced = {"seed": seed, "warm_start.seed": seed, "steps": ROLLOUTS, "log.diagnostics_every": 0, **fields}
    config = loading.load(loading.find(CONFIG), [(field, str(value)) for field, value in raced.items()])
    return settings.validate(config)


def arrived(accuracy: Sequence[float]) -> int | None:
    """The rollout at which the target is confirmed: the second of the first two evaluations in a row that reach it.

    accuracy: before the first rollout, and after each.
    """
    pairs = enumerate(pairwise(accuracy), 1)
    return next((rollout for rollout, pair in pairs if min(pair) >= TARGET), None)


def seconds(run: Mapping[str, Sequence[float]]) -> float:
    """CPU seconds of all rollouts up to the arrival; NaN if there is none."""
    rollout = arrived(run["accuracy"])
    return float("nan") if rollout is None else float(np.sum(run["cpu_s"][:rollout]))


def race(entries: Mapping[str, Path], seed: int, core: int | None) -> dict[str, Any]:
    """One seed of all entries, rollout by rollout in turns until each has arrived or has no rollouts left.

    Raises:
      RuntimeError: an entry ended; the message holds the end of its log.
    """
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        runners = {}
        for name, path in entries.items():
            command = [sys.executable, "-m", "experiments.speedrun.runner", "--entry", str(path), "--seed", str(seed)]
            log = Path(folder) / f"{name}.log"
            runners[name] = stack.enter_context(Runner(name, command, core, environment, log))
            first = runners[name].step()
            runs[name] = {"rehearsal_cpu_s": first["cpu_s"], "accuracy": [first["accuracy"]], "cpu_s": []}
        for _ in range(ROLLOUTS):
            for name, runner in runners.items():
                if arrived(runs[name]["accuracy"]) is None:
                    figures = runner.step()
                    runs[name]["accuracy"].append(figures["accuracy"])
                    runs[name]["cpu_s"].append(round(figures["cpu_s"], 4))
        for name, run in runs.items():
            print(f"seed {seed}, {name}: rollout {arrived(run['accuracy'])}, {seconds(run):.1f} CPU s", file=sys.stderr)
    return {"seed": seed, "runs": runs}


def ratio(seeds: Sequence[Mapping[str, Any]], entry: str, other: str) -> PairedDifference:
    """log(CPU seconds of the entry / of the other), paired by seed; one that has not arrived leaves its pair out."""
    ours, theirs = ([np.log(seconds(one["runs"][name])) for one in seeds] for name in (entry, other))
    return paired_difference(ours, theirs)


def verdict(d: PairedDifference, p: float, seeds: int) -> str:
    """The verdict of a race of so many seeds on an entry against another; p: corrected for the number of entries."""
    if d.n < seeds:
        return f"no arrival in {seeds - d.n} of {seeds}"
    if d.n < MINIMUM_SEEDS:
        return f"estimate only: {d.n} of {MINIMUM_SEEDS} seeds"
    if p >= 1 - LEVEL:
        return "undecided"
    return "faster" if d.mean < 0 else "slower"


def table(result: Mapping[str, Any]) -> str:
    """A row an entry: rollouts and CPU seconds to the target by seed, the ratio to the first entry, the verdict."""
    first, *others = result["entries"]
    ratios = [ratio(result["seeds"], name, first) for name in others]
    told = ["1 | "]
    for d, p in zip(ratios, holm([d.p for d in ratios]), strict=True):
        mean, low, high = np.exp([d.mean, d.low, d.high])
        told.append(f"{mean:.2f} [{low:.2f}, {high:.2f}] | {verdict(d, p, len(result['seeds']))}")
    rows = ["| entry | rollouts | CPU s | ratio | verdict |", "| -- | -- | -- | -- | -- |"]
    for name, against in zip([first, *others], told, strict=True):
        runs = [one["runs"][name] for one in result["seeds"]]
        rollouts = ", ".join(str(arrived(run["accuracy"]) or "-") for run in runs)
        took = ", ".join(f"{seconds(run):.1f}" for run in runs)
        rows.append(f"| {name} | {rollouts} | {took} | {against} |")
    return "\n".join(rows)


def _raced(given: argparse.Namespace) -> dict[str, Any]:
    """The race of a command line; it is written after every seed."""
    entries = {path.stem: path for path in (given.against, *given.entry)}
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": checkout.commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "entries": {name: fields_of(path) for name, path in entries.items()},
        "seeds": [],
    }
    for fields in result["entries"].values():
        settings_of(fields, given.first_seed)
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        result["seeds"].append(race(entries, seed, given.core))
        if given.json:
            given.json.write_text(json.dumps(result) + "\n")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entry", type=Path, nargs="+", default=[], help="JSON files, raced against the first entry")
    parser.add_argument("--against", type=Path, default=BASELINE, help="the first entry; default: the baseline")
    parser.add_argument("--seeds", type=int, default=MINIMUM_SEEDS, help="0, 1, ...")
    parser.add_argument("--first_seed", type=int, default=0, help="from 100 on for trials")
    parser.add_argument("--core", type=int, help="core of all; default: none")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--table", type=Path, nargs="+", help="results to show instead of a race")
    given = parser.parse_args()
    for path in given.table or ():
        result = json.loads(path.read_text())
        print(f"{path.stem}, {result['date']}, commit {result['commit'][:7]}\n\n{table(result)}\n")
    if given.table:
        return
    try:
        result = _raced(given)
    except (ValueError, OSError, RuntimeError) as error:
        parser.exit(2, f"error: {error}\n")
    print(table(result))


if __name__ == "__main__":
    main()
