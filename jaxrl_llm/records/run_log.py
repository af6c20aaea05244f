"""The files that a run writes into its DIR; the display on the terminal is in screen.py.

config.json     the format of the DIR, configuration, its hash, commit, versions, device and core count
metrics.jsonl   one JSON object a step: {"step": 3, "reward/mean": 0.41, ...}; lists for per-layer metrics, null for
                a number that is not finite
samples.jsonl   one JSON object an answer: {"step": 3, "prompt": ..., "answer": ..., "reward": ...}
events.out.*    scalars, values by layer, samples and configuration for TensorBoard (writers.py)
wandb/          the same for Weights & Biases, if it is on
result.json     written once, when the run is complete: its presence is what "finished" means
"""

import contextlib
import fcntl
import io
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.json_files import decoded, json_object
from jaxrl_llm.ground.machine import refuse_links
from jaxrl_llm.ground.terminal import one_line
from jaxrl_llm.records.screen import Screen
from jaxrl_llm.records.watch import PAGE, Watch
from jaxrl_llm.records.writers import TensorBoard

_ASKED_FOR = ByName({"WeightsAndBiases": "jaxrl_llm.records.wandb_writer"})


def plain(value: Any) -> Any:
    """JSON-ready copy of nested dicts, lists, arrays and numbers; a number that is not finite becomes None (null)."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):  # numpy and JAX arrays and scalars
        return plain(np.asarray(value).tolist())
    return str(value)


def shown_answer(prompt: str, answer: str, reward: float | None) -> str:
    """A prompt with an answer and its reward, in a line of at most 78 characters."""
    given = "" if reward is None else f"   reward {reward:.3g}"
    return f"{one_line(prompt, 34)} -> {one_line(answer, 78 - 38 - len(given))}{given}"


def write_json(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
    """Write the whole file or nothing, so that no reader sees a half-written one."""
    _replace(Path(path), (json.dumps(plain(value), indent=1, allow_nan=False) + "\n").encode())


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The object in the file; None if there is no file. Raises ValueError if it holds something else."""
    return json_object(path, "bring it back from a copy, or remove it") if Path(path).exists() else None


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a .jsonl file, without damaged lines and a half-written last one; none if there is no file."""
    return [row for _, row in scan_rows(path)[0]]


def scan_rows(path: str | os.PathLike[str]) -> tuple[list[tuple[bytes, dict[str, Any]]], list[tuple[int, bytes, str]]]:
    """Every (line, row) of a .jsonl file, and every (number of the line, line, reason) of those that are damaged.

    Damaged is what is no JSON object, lacks the fields by which its rows are known (`_KNOWN_BY`), or repeats them where
    they stand for one row. A half-written last line, which a kill leaves, is neither.
    """
    rows, damaged, seen = [], [], set()
    content = io.BytesIO(Path(path).read_bytes() if Path(path).exists() else b"")
    known_by, once = _KNOWN_BY.get(Path(path).name, ({}, False))
    for number, line in enumerate(content, 1):
        if not line.endswith(b"\n") or not line.strip():
            continue
        try:
            row = _row(line, known_by)
            name = tuple(row[field] for field in known_by)
            if once and name in seen:
                named = ", ".join(f"{field} {row[field]}" for field in known_by if row[field] != "")
                raise ValueError(f"it repeats the row of {named}")
        except ValueError as error:
            damaged.append((number, line, str(error)))
        else:
            seen.add(name)
            rows.append((line, row))
    return rows, damaged


# The folders of a DIR that a run writes into by itself; Weights & Biases keeps links of its own in another.
_FOLDERS = ("checkpoints", "damaged_checkpoints", "local", "reference", "profile")

# What identifies a row of a file, and whether it may be there once only.
_KNOWN_BY: dict[str, tuple[dict[str, type], bool]] = {
    "metrics.jsonl": ({"step": int}, True),
    "samples.jsonl": ({"step": int}, False),
    "branches.jsonl": ({"state": int, "arm": str, "step": int}, True),
}


def _row(line: bytes, known_by: Mapping[str, type]) -> dict[str, Any]:
    row = decoded(line.decode())
    if not isinstance(row, dict):
        raise ValueError("it holds no JSON object")
    for field, kind in known_by.items():
        if type(row.get(field)) is not kind:
            raise ValueError(f"{field}={row.get(field)!r:.40} is not {'a whole number' if kind is int else 'text'}")
    if b"\\ud" in line.lower():
        json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text
    return row


def said_of_damage(path: str | os.PathLike[str], damaged: Sequence[tuple[int, bytes, str]]) -> str:
    """ "DIR/metrics.jsonl, line 3 and 2 more are damaged (line 3: it holds no JSON object)"; "" if nothing is."""
    if not damaged:
        return ""
    number, _, reason = damaged[0]
    more = f" and {len(damaged) - 1} more are" if len(damaged) > 1 else " is"
    return f"{path}, line {number}{more} damaged ({reason})"


def missing_steps(rows: Iterable[Mapping[str, Any]], first: int, last: int) -> str:
    """The steps from first to last that have no row, as "3" or "0 to 4, 7"; "" if there is none."""
    known = sorted({step for row in rows if first <= (step := row["step"]) <= last})
    gaps = [(a + 1, b - 1) for a, b in itertools.pairwise([first - 1, *known, last + 1]) if b - a > 1]
    return ", ".join(f"{a} to {b}" if a < b else f"{a}" for a, b in gaps)


def add_rows(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    with _written(path), open(path, "a", encoding="utf-8") as log:
        log.write(_lines([plain(row) for row in rows]))


def keep_rows(path: str | os.PathLike[str], wanted: Callable[[Mapping[str, Any]], bool]) -> str:
    """Remove all rows but the wanted ones, and a half-written last line, from a .jsonl file if it exists.

    Damaged lines move to NAME.damaged beside it. Returns what is to be said of them, "" if there are none.
    """
    path = Path(path)
    if not path.exists():
        return ""
    rows, damaged = scan_rows(path)
    aside = path.with_name(f"{path.name}.damaged")
    if damaged:
        with _written(aside), open(aside, "ab") as kept:
            kept.writelines(line for _, line, _ in damaged)
    _replace(path, b"".join(line for line, row in rows if wanted(row)))
    return f"{said_of_damage(path, damaged)}; set aside in {aside}" if damaged else ""


class RunLog:
    """The logs of one run in its DIR, open for writing; use it as a context manager.

    With write=False, as on every host but the first, all methods do nothing.

    Args:
        stream: where progress is shown; standard output by default.
        wandb: the project of Weights & Biases that gets the run too; "" for none.

    Raises:
        OSError: the DIR cannot be written, or another process is writing it.
        ModuleNotFoundError: `wandb` is given and its package is not installed.
        ValueError: a file or folder of the DIR is a symbolic link, or Weights & Biases cannot be reached, or nobody is
            logged in.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        total_steps: int,
        *,
        stream: io.TextIOBase | None = None,
        write: bool = True,
        wandb: str = "",
    ):
        self.workdir = Path(workdir)
        self._write = write
        self.screen = Screen(total_steps, stream=stream, write=write)
        self._watch = Watch()
        self._standing: dict[str, str] = {}  # warnings that hold from the start on
        self._said: set[str] = set()
        self._held_out: list[str] = []  # two answers of the last evaluation, shown below its row
        inside = (folder for name in _FOLDERS for folder in (self.workdir / name).glob("**"))
        refuse_links(self.workdir, *inside)  # of every process, since each has checkpoints of its own in local/
        if not write:
            return
        try:
            self.workdir.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.workdir / ".lock", "w")
        except OSError as error:
            raise OSError(f"workdir={self.workdir} cannot be written ({error}); give another --workdir") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise OSError(f"workdir={self.workdir} is being written by another process; wait or stop it") from error
        try:
            self._writers: list[Any] = [TensorBoard(self.workdir)]
            if wandb:
                self._writers.append(_ASKED_FOR["WeightsAndBiases"](wandb, self.workdir))
            self._open()
        except BaseException:
            self._lock.close()
            raise

    def _open(self) -> None:
        self._metrics = open(self.workdir / "metrics.jsonl", "a", encoding="utf-8")
        self._samples = open(self.workdir / "samples.jsonl", "a", encoding="utf-8")

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Safe after an interrupt and safe to call twice."""
        self.screen.close()
        if self._write and not self._lock.closed:
            for log in (self._metrics, self._samples, *self._writers, self._lock):
                with contextlib.suppress(OSError):  # what is still there could not be written, and that was raised
                    log.close()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write what `provenance.describe` knows of the run."""
        if self._write:
            write_json(self.workdir / "config.json", config)
            for writer in self._writers:
                writer.config(plain(config))

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one row to metrics.jsonl, to every writer and to the screen, with the warnings that hold then."""
        if not self._write:
            return
        row = {"step": int(step)} | plain(values)
        warnings = self._standing | self._watch.after(row)
        if warnings:
            row["log/warnings"] = list(warnings)
        _append(self._metrics, [row])
        with _written(f"the log in {self.workdir}"):
            for writer in self._writers:
                writer.metrics(int(step), row)
        self.screen.step(row)
        for answer in self._held_out:
            self.note(f"  {answer}")
        self._held_out = []
        self._say(warnings)

    def warn(self, warnings: Mapping[str, str]) -> None:
        """Warnings that hold from now on, {name: text}: every row has their names."""
        self._standing = dict(warnings)
        self._say(warnings)

    def _say(self, warnings: Mapping[str, str]) -> None:
        """Show each of them once."""
        for name, text in warnings.items():
            if name not in self._said:
                self.note(f"warning {name}: {text}; more in {PAGE}")
        self._said |= warnings.keys()

    def note(self, text: str) -> None:
        self.screen.note(text)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows of samples.jsonl: prompt, answer, reward and whatever else is worth reading."""
        if self._write and rows:
            plain_rows = [plain(row) for row in rows]
            if held_out := [row for row in plain_rows if "greedy" in row]:
                self._held_out = [shown_answer(row["prompt"], row["greedy"], row.get("reward")) for row in held_out[:2]]
            _append(self._samples, [{"step": int(step)} | row for row in plain_rows])
            with _written(f"the log in {self.workdir}"):
                for writer in self._writers:
                    writer.samples(int(step), plain_rows)

    def result(self, values: Mapping[str, Any]) -> None:
        """Write result.json, the mark of a finished run: call it last."""
        if self._write:
            write_json(self.workdir / "result.json", values)

    def cut(self, step: int, first: int = 0) -> None:
        """Remove every row later than `step` from every log, and half-written last lines; note damaged and lost rows.

        Call it on resume with the step of the restored checkpoint, or with -1 when there is none: a run that died
        between two checkpoints has written rows that the resumed run writes again. The first row is that of `first`.
        """
        if not self._write:
            return
        for log in (self._metrics, self._samples):
            log.close()
        for name in ("metrics.jsonl", "samples.jsonl"):
            if said := keep_rows(self.workdir / name, lambda row: row["step"] <= step):
                self.note(said)
        if lost := missing_steps(read_rows(self.workdir / "metrics.jsonl"), first, step):
            self.note(
                f"{self.workdir / 'metrics.jsonl'} has lost the rows of steps {lost}; the run goes on without them"
            )
        for writer in self._writers:
            writer.cut(step)
        self._watch = Watch()
        for row in read_rows(self.workdir / "metrics.jsonl"):
            self._watch.after(row)
        (self.workdir / "result.json").unlink(missing_ok=True)
        self._open()


def _append(log: IO[str], rows: Iterable[Mapping[str, Any]]) -> None:
    with _written(log.name):
        log.write(_lines(rows))
        log.flush()


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n" for row in rows)


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    with _written(path):
        part.write_bytes(content)
        os.replace(part, path)


@contextlib.contextmanager
def _written(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give what fails in here the name of the file: a full disk has none."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error}); make room there and give the same command") from error
