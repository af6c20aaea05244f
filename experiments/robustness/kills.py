"""python -m experiments.robustness.kills [--kills 50] [--seed 0]: SIGKILLs, and what every restart makes of them.

A run is killed in the midst of a rollout, of an update, while a checkpoint is written, or at any moment after its start
(imports, compilation and restoring included); the same command then goes on, and is killed again. A sweep is killed
alone or with its run. Ended runs must equal the one that nothing disturbed: every row but the clock's, every sample,
the result and the digests of the state.
"""

import argparse
import collections
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from experiments.robustness.small import Child, arguments, outcome, seconds, write
from jaxrl_llm.records.checkpointing import steps_of

MOMENTS = ("rollout", "update", "save", "any")
_A_RUN = 3  # kills of one run
_RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="one in ten is of a sweep")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    table: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in (*MOMENTS, "sweep")}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        of_sweeps = given.kills // 10
        _runs(folder, rng, given.kills - of_sweeps, table)
        _sweeps(folder, rng, of_sweeps, table)
    record = {"kills": given.kills, "seed": given.seed} | {name: dict(counts) for name, counts in table.items()}
    write(_RESULTS / "kills.json", record)
    print(as_table(record))
    return 0 if all(counts["killed"] == counts["went on"] for counts in table.values()) else 1


def as_table(record: dict) -> str:
    lines = ["| killed in | kills | restarts that went on |", "|---|---|---|"]
    for name in (*MOMENTS, "sweep"):
        counts = record[name]
        inside = ", ".join(f"{key} {n}" for key, n in counts.items() if key not in ("killed", "went on"))
        went_on = counts.get("went on", 0)
        lines.append(f"| {name}{f' ({inside})' if inside else ''} | {counts.get('killed', 0)} | {went_on} |")
    return "\n".join(lines)


def _runs(folder: Path, rng: random.Random, kills: int, table: dict[str, collections.Counter[str]]) -> None:
    undisturbed = Child(arguments(folder, folder / "whole"), folder / "whole.txt")
    assert undisturbed.finish() == 0, undisturbed.printed()
    expected = outcome(folder / "whole")
    waiting = [MOMENTS[i % len(MOMENTS)] for i in range(kills)]
    rng.shuffle(waiting)
    number = 0
    while waiting:
        number += 1
        workdir, output, killed = folder / f"run{number}", folder / f"run{number}.txt", []
        while True:
            child = Child(arguments(folder, workdir), output)
            if waiting and len(killed) < _A_RUN and _killed(child, waiting[-1], rng, workdir, table):
                killed.append(waiting.pop())
                continue
            code = child.finish()
            break
        same = code == 0 and outcome(workdir) == expected
        for moment in killed:
            table[moment]["went on"] += same
        if not same:
            print(f"run {number}, killed in {killed}: exit code {code}\n{child.printed()[-3000:]}", file=sys.stderr)
        print(f"run {number}: killed in {', '.join(killed)}; {'equal' if same else 'DIFFERENT'}", flush=True)
        shutil.rmtree(workdir)


def _killed(child: Child, moment: str, rng: random.Random, workdir: Path, table: dict) -> bool:
    """Kill the run in this moment; False where it had ended before."""
    if moment == "save":
        after = rng.randint(1, 3)
        seen: set[str] = set()

        def saving() -> bool:
            seen.update(path.name for path in (workdir / "checkpoints").glob("*tmp*"))
            return len(seen) >= after

        in_time = child.wait(saving)
        seconds(rng, 0.05)
    elif moment == "any":
        in_time = True
        seconds(rng, 8.0)
    else:
        times = rng.randint(1, 6)
        in_time = child.wait(lambda: child.phase == moment and child.entered(moment) >= times)
        seconds(rng, 0.1)
    if not (in_time and child.kill()):
        return False
    during = "save" if any((workdir / "checkpoints").glob("*tmp*")) else child.phase
    table[moment]["killed"] += 1
    table[moment][f"in {during}" if steps_of(workdir) else f"in {during} before a checkpoint"] += 1
    return True


def _sweeps(folder: Path, rng: random.Random, kills: int, table: dict[str, collections.Counter[str]]) -> None:
    """Two runs, one after the other. A sweep that is killed alone leaves its run, which the next sweep waits for."""
    if not kills:
        return
    expected = None
    for workdir, left in ((folder / "sweep_whole", 0), (folder / "sweep", kills)):
        killed = 0
        while True:
            process = _start_sweep(folder, workdir)
            if killed == left or not _killed_sweep(process, rng, table["sweep"]):
                break
            killed += 1
        code, runs = process.wait(), [workdir / "DAPO" / str(seed) for seed in (0, 1)]
        assert code == 0, f"exit code {code} of {workdir}"
        found = [outcome(run) for run in runs]
        expected = expected or found
        table["sweep"]["went on"] += killed * (found == expected)
        print(f"{workdir.name}, killed {killed} times: {'equal' if found == expected else 'DIFFERENT'}", flush=True)


def _start_sweep(folder: Path, workdir: Path) -> psutil.Popen:
    command = [sys.executable, "-m", "jaxrl_llm.sweep", "--sweep", f"experiments/robustness/sweep.py:{folder}"]
    return psutil.Popen([*command, f"--workdir={workdir}", "--cores=1"], stdout=subprocess.DEVNULL)


def _killed_sweep(process: psutil.Popen, rng: random.Random, counts: collections.Counter[str]) -> bool:
    """Kill the sweep, in one case of two with its run; False where it had ended before."""
    seconds(rng, 20.0)
    with_run = rng.random() < 0.5
    if process.poll() is not None:
        return False
    runs = process.children(recursive=True)
    process.kill()
    process.wait()
    for run in runs if with_run else []:
        run.kill()
    psutil.wait_procs(runs)
    counts["killed"] += 1
    counts["with its run" if with_run else "alone"] += 1
    return True


if __name__ == "__main__":
    sys.exit(main())
