"""python -m experiments.robustness.corruptions [--corruptions 100] [--seed 0]: damage to a run's newest checkpoint.

Each time one file of the checkpoint, or a folder of it, is changed: a bit, a block of zeros, its end cut off, or gone.
What is restored must be the state of that step as it was written (harmless), or the step before with a line that names
the damage (detected). Every twentieth time the run goes on and must end as the one that nothing disturbed.
"""

import argparse
import collections
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.robustness.small import STEPS, Child, arguments, outcome, write
from jaxrl_llm.config import loading
from jaxrl_llm.config.command_line import fields_and_rest
from jaxrl_llm.records.checkpointing import Checkpoints, steps_of
from jaxrl_llm.records.digests import digests
from jaxrl_llm.run.assembly import build
from jaxrl_llm.run.settings import validate

_RESULTS = Path(__file__).parent / "results"
_STOPPED = STEPS // 2  # where the runs have come to when their newest checkpoint is damaged
_GOES_ON = 20  # one corruption in so many is followed by the rest of the run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corruptions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, steps in (("whole", STEPS), ("half", _STOPPED)):
            child = Child(arguments(folder, folder / name, steps=steps), folder / f"{name}.txt")
            assert child.finish() == 0, child.printed()
        like = _blank(arguments(folder, folder / "half"))
        for number in range(given.corruptions):
            workdir = folder / "damaged"
            shutil.copytree(folder / "half", workdir)
            kind = rng.choice(list(KINDS))
            KINDS[kind](rng, workdir / "checkpoints" / str(_STOPPED))
            found = _restored(workdir, like)
            table[kind][found] += 1
            if number % _GOES_ON == 0:
                same = _goes_on(folder, workdir)
                table[kind]["went on to an equal end" if same else "WENT ON TO ANOTHER END"] += 1
            print(f"{number}: {kind}: {found}", flush=True)
            shutil.rmtree(workdir)
    record = {"corruptions": given.corruptions, "seed": given.seed, "kinds": {k: dict(v) for k, v in table.items()}}
    write(_RESULTS / "corruptions.json", record)
    print(as_table(record))
    return int(any(name.isupper() for counts in table.values() for name in counts))


def as_table(record: dict[str, Any]) -> str:
    columns = ("harmless", "detected", "MISSED", "went on to an equal end", "WENT ON TO ANOTHER END")
    lines = [f"| damage | {' | '.join(column.lower() for column in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for kind, counts in record["kinds"].items():
        lines.append(f"| {kind} | {' | '.join(str(counts.get(column, 0)) for column in columns)} |")
    return "\n".join(lines)


def _blank(given: list[str]) -> Any:
    """A state of the structure that the checkpoints have."""
    fields, _ = fields_and_rest(given)
    return build(validate(loading.load(loading.find("dapo:smoke"), fields))).blank()


def _restored(workdir: Path, like: Any) -> str:
    """harmless, detected or MISSED."""
    said: list[str] = []
    checkpoints = Checkpoints(workdir, 2)
    try:
        step, state, _ = checkpoints.restore(like, note=said.append)
    finally:
        checkpoints.close()
    written = workdir.with_name("half") / "checkpoints" / str(step) / "payload" / "metadata"
    intact = digests(state) == json.loads(written.read_text())["digests"]
    if intact and step == _STOPPED and not said:
        return "harmless"
    named = len(said) == 1 and f"checkpoints/{_STOPPED} is damaged" in said[0]
    # Orbax does not see a folder without its marks as a checkpoint at all: it is as if it had never been whole.
    unseen = not said and _STOPPED not in steps_of(workdir)
    return "detected" if intact and step == _STOPPED - 1 and (named or unseen) else "MISSED"


def _goes_on(folder: Path, workdir: Path) -> bool:
    child = Child(arguments(folder, workdir), folder / "goes_on.txt")
    if child.finish() == 0 and outcome(workdir) == outcome(folder / "whole"):
        return True
    print(child.printed(), file=sys.stderr)
    return False


def _files(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


def _bit(rng: random.Random, step: Path) -> None:
    path = rng.choice([path for path in _files(step) if path.stat().st_size])
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _zeros(rng: random.Random, step: Path) -> None:
    path = rng.choice([path for path in _files(step) if path.stat().st_size])
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.randint(1, 4096))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def _truncation(rng: random.Random, step: Path) -> None:
    path = rng.choice([path for path in _files(step) if path.stat().st_size])
    with open(path, "r+b") as file:
        file.truncate(rng.randrange(path.stat().st_size))


def _deletion(rng: random.Random, step: Path) -> None:
    rng.choice(_files(step)).unlink()


def _deleted_folder(rng: random.Random, step: Path) -> None:
    shutil.rmtree(rng.choice(sorted(path for path in (step, *step.rglob("*")) if path.is_dir())))


KINDS: dict[str, Callable[[random.Random, Path], None]] = {
    "a flipped bit": _bit,
    "a block of zeros": _zeros,
    "a file cut short": _truncation,
    "a deleted file": _deletion,
    "a deleted folder": _deleted_folder,
}


if __name__ == "__main__":
    sys.exit(main())
