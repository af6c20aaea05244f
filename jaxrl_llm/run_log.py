"""What a run leaves in its DIR while it runs, and what a person sees of it on the terminal.

    config.json     the configuration, its hash, commit, versions, device and core count
    metrics.jsonl   one JSON object a step: {"step": 3, "reward/mean": 0.41, ...}; lists for per-layer metrics, null for
                    a number that is not finite
    samples.jsonl   one JSON object an answer: {"step": 3, "prompt": ..., "answer": ..., "reward": ...}
    events.out.*    the scalars of metrics.jsonl for TensorBoard
    result.json     written once, when the run is complete: its presence is what "finished" means

A run that died between two checkpoints has written rows that the resumed run will write again. `RunLog.cut` takes them
out of every log, so that no step ever stands there twice.
"""

import fcntl
import io
import json
import math
import os
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter
from tensorboardX.proto import event_pb2

__all__ = ["RunLog", "plain", "read_json", "read_rows", "write_json"]


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
    """Write all of it or nothing: a reader never meets a half-written file."""
    _replace(Path(path), (json.dumps(plain(value), indent=1, allow_nan=False) + "\n").encode())


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The object in the file, None where there is no file.

    Raises:
        ValueError: the file holds something else.
    """
    path = Path(path)
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not whole JSON ({error}); bring it back from a copy, or remove it") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object; bring it back from a copy, or remove it")
    return value


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The whole rows of a .jsonl file, in file order; a half-written last line is left out, no file is no rows."""
    path = Path(path)
    return [json.loads(line) for line in _whole_lines(path.read_bytes())] if path.exists() else []


class RunLog:
    """The logs of one run, open for writing; use it as a context manager.

    Args:
        workdir: the run's DIR, made when missing.
        total_steps: steps of the whole run, for the progress line.
        stream: where progress goes; standard output by default. A terminal gets one line that is rewritten, anything
            else gets one plain line a step.
        write: False on every host but the first: all methods are then silent.

    Raises:
        OSError: the DIR cannot be written, or another process is writing it.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        total_steps: int,
        *,
        stream: io.TextIOBase | None = None,
        write: bool = True,
    ):
        self.workdir = Path(workdir)
        self.total_steps = total_steps
        self._write = write
        self._stream: Any = sys.stdout if stream is None else stream
        self._began: tuple[float, int] | None = None
        self._open_line = False
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
        self._open()

    def _open(self) -> None:
        self._metrics = open(self.workdir / "metrics.jsonl", "a", encoding="utf-8")
        self._samples = open(self.workdir / "samples.jsonl", "a", encoding="utf-8")
        # Event files are named by the second: the suffix keeps a quick resume from opening the file of the run before.
        suffix = f".{len(list(self.workdir.glob('events.out.*')))}"
        self._events = SummaryWriter(logdir=str(self.workdir), filename_suffix=suffix, flush_secs=10)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Flush and close everything; safe after an interrupt and safe to call twice."""
        if self._open_line:
            self._stream.write("\n")
            self._open_line = False
        if self._write and not self._lock.closed:
            for log in (self._metrics, self._samples, self._events, self._lock):
                log.close()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """config.json: whatever the caller knows of the run (config, config_hash, commit, versions, device, cores)."""
        if self._write:
            write_json(self.workdir / "config.json", config)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl, its scalars as TensorBoard events, and the progress line."""
        if not self._write:
            return
        row = {"step": int(step)} | plain(values)
        _append(self._metrics, [row])
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self._events.add_scalar(name, value, step)
        self._events.flush()
        self._progress(step, row)

    def note(self, text: str) -> None:
        """A line for the person who watches, in no file."""
        if self._write:
            self._stream.write(f"\n{text}\n" if self._open_line else f"{text}\n")
            self._stream.flush()
            self._open_line = False

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of samples.jsonl: prompt, answer, reward and what else a person wants to read."""
        if self._write:
            _append(self._samples, [{"step": int(step)} | plain(row) for row in rows])

    def result(self, values: Mapping[str, Any]) -> None:
        """result.json, the mark of a finished run: call it last."""
        if self._write:
            write_json(self.workdir / "result.json", values)

    def cut(self, step: int) -> None:
        """Remove every row later than `step` from metrics, samples and TensorBoard, and half-written last lines.

        Call it on resume with the step of the restored checkpoint, or with -1 when there is none. The event files are
        rewritten record by record (wall times stay) instead of relying on TensorBoard's purge_step, which only hides
        the old rows from some readers.
        """
        if not self._write:
            return
        for log in (self._metrics, self._samples, self._events):
            log.close()
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = self.workdir / name
            lines = _whole_lines(path.read_bytes())
            _replace(path, b"".join(line for line in lines if json.loads(line)["step"] <= step))
        for path in self.workdir.glob("events.out.*"):
            _replace(path, b"".join(_event_records(path.read_bytes(), step)))
        (self.workdir / "result.json").unlink(missing_ok=True)
        self._open()

    def _progress(self, step: int, row: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = (now, step)
        began, first = self._began
        parts = [f"step {step}/{self.total_steps}"]
        clipped = [row[k] for k in ("clip/low", "clip/high") if row.get(k) is not None]
        shown = {
            "reward": ("{:.3f}", row.get("reward/mean")),
            "length": ("{:.1f}", row.get("rollout/length_mean")),
            "clip": ("{:.2%}", sum(clipped) if clipped else None),
            "tokens/s": ("{:,.0f}", row.get("rollout/tokens_per_s")),
            "held-out": ("{:.3f}", row.get("eval/greedy")),
        }
        parts += [f"{name} {form.format(value)}" for name, (form, value) in shown.items() if value is not None]
        if step > first:
            left = (now - began) / (step - first) * max(self.total_steps - step, 0)
            parts.append(f"{_clock(now - began)}<{_clock(left)}")
        line = "  ".join(parts)
        if self._stream.isatty():
            filled = round(20 * min(step / max(self.total_steps, 1), 1))
            self._stream.write(f"\r\x1b[K|{'█' * filled}{'·' * (20 - filled)}| {line}")
            self._open_line = True
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes:02d}:{seconds:02d}"


def _append(log: io.TextIOBase, rows: Iterable[Mapping[str, Any]]) -> None:
    log.write("".join(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n" for row in rows))
    log.flush()


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)


def _whole_lines(content: bytes) -> list[bytes]:
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n") and line.strip()]


def _event_records(content: bytes, last_step: int) -> Iterator[bytes]:
    """The records (length u64, crc u32, data, crc u32) of an event file up to a step, without a broken end."""
    start = 0
    while start + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, start)
        end = start + 12 + length + 4
        if end > len(content):
            return
        event = event_pb2.Event.FromString(content[start + 12 : end - 4])  # pyright: ignore[reportAttributeAccessIssue]
        if not event.HasField("summary") or event.step <= last_step:
            yield content[start:end]
        start = end
