"""Sweeps of `fake_program`: their file, their command line, and what their runs have left."""

import sys

from jaxrl_llm.records.run_log import read_rows

FILE = """
from jaxrl_llm.sweep import Sweep, each, product

def get_sweep(variant="plain"):
    arms = [{{"arm": "A", "objective": "a"{first}}}, {{"arm": "B", "objective": "b"{extra}}}]
    runs = product(arms, [{{"steps": 4}}], each("seed", range({seeds})))
    return Sweep("Is " + variant + " B better?", runs, baseline="A", minutes=0.1)
"""


def sweep_file(folder, *, extra="", first="", seeds=2):
    path = folder / "sweep.py"
    path.write_text(FILE.format(extra=extra, first=first, seeds=seeds))
    return path


def starts(workdir):
    return {str(path.parent.relative_to(workdir)): len(read_rows(path)) for path in workdir.rglob("starts.txt")}


def sweep_command(path, workdir):
    return [sys.executable, "-m", "fake_program", "sweep", "--sweep", str(path), "--workdir", str(workdir)]


def whole(workdir, name, steps=4):
    return [row["step"] for row in read_rows(workdir / name / "metrics.jsonl")] == list(range(steps + 1))
