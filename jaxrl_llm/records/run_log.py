"""The files that a run writes into its DIR; the display on the terminal is in screen.py.

config.json     the configuration, its hash, commit, versions, device and core count
metrics.jsonl   one JSON object a step: {"step": 3, "reward/mean": 0.41, ...}; lists for per-layer metrics, null for
                a number that is not finite
samples.jsonl   one JSON object an answer: {"step": 3, "prompt": ..., "answer": ..., "reward": ...}
events.out.*    scalars, values by layer, samples and configuration for TensorBoard (writers.py)
wandb/          the same for Weights & Biases, if it is on
result.json     written once, when the run is complete: its presence is what "finished" means
"""

import fcntl
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxrl_llm.records.screen import Screen
from jaxrl_llm.records.watch import Watch
from jaxrl_llm.records.writers import TensorBoard, WeightsAndBiases


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


def write_json(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
    """Write the whole file or nothing, so that no reader sees a half-written one."""
    _replace(Path(path), (json.dumps(plain(value), indent=1, allow_nan=False) + "\n").encode())


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The object in the file; None if there is no file. Raises ValueError if it holds something else."""
    path = Path(path)
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); bring it back from a copy, or remove it") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object; bring it back from a copy, or remove it")
    return value


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a .jsonl file, without a half-written last line; none if there is no file."""
    return [json.loads(line) for line in _whole_lines(path)] if Path(path).exists() else []


def add_rows(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    with open(path, "a", encoding="utf-8") as log:
        _append(log, [plain(row) for row in rows])


def keep_rows(path: str | os.PathLike[str], wanted: Callable[[Mapping[str, Any]], bool]) -> None:
    """Remove all rows but the wanted ones, and a half-written last line, from a .jsonl file if it exists."""
    if Path(path).exists():
        _replace(Path(path), b"".join(line for line in _whole_lines(path) if wanted(json.loads(line))))


class RunLog:
    """The logs of one run in its DIR, open for writing; use it as a context manager.

    With write=False, as on every host but the first, all methods do nothing.

    Args:
        stream: where progress is shown; standard output by default.
        wandb: the project of Weights & Biases that gets the run too; "" for none.

    Raises:
        OSError: the DIR cannot be written, or another process is writing it.
        ModuleNotFoundError: `wandb` is given and its package is not installed.
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
            self._writers = [TensorBoard(self.workdir), *([WeightsAndBiases(wandb, self.workdir)] if wandb else [])]
        except ModuleNotFoundError:
            self._lock.close()
            raise
        self._open()

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
                log.close()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """What `provenance.describe` knows of the run."""
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
        for writer in self._writers:
            writer.metrics(int(step), row)
        self.screen.step(row)
        self._say(warnings)

    def warn(self, warnings: Mapping[str, str]) -> None:
        """Warnings that hold from now on, {name: text}: every row has their names."""
        self._standing = dict(warnings)
        self._say(warnings)

    def _say(self, warnings: Mapping[str, str]) -> None:
        """Show each of them once."""
        for name, text in warnings.items():
            if name not in self._said:
                self.note(f"warning {name}: {text}")
        self._said |= warnings.keys()

    def note(self, text: str) -> None:
        self.screen.note(text)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows of samples.jsonl: prompt, answer, reward and whatever else is worth reading."""
        if self._write and rows:
            plain_rows = [plain(row) for row in rows]
            _append(self._samples, [{"step": int(step)} | row for row in plain_rows])
            for writer in self._writers:
                writer.samples(int(step), plain_rows)

    def result(self, values: Mapping[str, Any]) -> None:
        """Write result.json, the mark of a finished run: call it last."""
        if self._write:
            write_json(self.workdir / "result.json", values)

    def cut(self, step: int) -> None:
        """Remove every row later than `step` from every log, and half-written last lines.

        Call it on resume with the step of the restored checkpoint, or with -1 when there is none: a run that died
        between two checkpoints has written rows that the resumed run writes again.
        """
        if not self._write:
            return
        for log in (self._metrics, self._samples):
            log.close()
        for name in ("metrics.jsonl", "samples.jsonl"):
            keep_rows(self.workdir / name, lambda row: row["step"] <= step)
        for writer in self._writers:
            writer.cut(step)
        self._watch = Watch()
        for row in read_rows(self.workdir / "metrics.jsonl"):
            self._watch.after(row)
        (self.workdir / "result.json").unlink(missing_ok=True)
        self._open()


def _append(log: IO[str], rows: Iterable[Mapping[str, Any]]) -> None:
    log.write("".join(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n" for row in rows))
    log.flush()


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)


def _whole_lines(path: str | os.PathLike[str]) -> list[bytes]:
    lines = Path(path).read_bytes().splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n") and line.strip()]
