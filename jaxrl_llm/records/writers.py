"""Where a run's metrics and samples go besides its .jsonl files: TensorBoard and, if set, Weights & Biases.

Both get scalars under the keys of metrics.jsonl, a list as one scalar for each layer (`name/0`, `name/1`, ...), the
samples as text and the configuration. Lists of lists are in metrics.jsonl only.
"""

import functools
import importlib
import json
import os
import struct
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl, with lists of numbers spread out, without null and lists of lists."""
    spread: dict[str, float] = {}
    for name, value in row.items():
        values = {f"{name}/{i}": one for i, one in enumerate(value)} if isinstance(value, list) else {name: value}
        spread |= {key: one for key, one in values.items() if isinstance(one, int | float) and name != "step"}
    return spread


@functools.cache
def _tensorboardx() -> Any:
    """tensorboardX, imported as if PyTorch were absent, whose import takes seconds and serves the name of one type."""
    loaded: dict[str, Any] = sys.modules
    if "torch" in loaded:
        return importlib.import_module("tensorboardX")
    loaded["torch"] = None  # `import torch` raises ImportError, which tensorboardX catches
    try:
        return importlib.import_module("tensorboardX")
    finally:
        del loaded["torch"]


class TensorBoard:
    """An event file in the DIR, opened at the first write so that none is empty."""

    def __init__(self, workdir: Path):
        self._workdir = workdir
        self._open_writer: Any = None
        self._config: Row | None = None

    def _add(self, step: int, summary: Any) -> None:
        """Write one event here and now: the thread of SummaryWriter dies on a full disk, and who flushes it waits."""
        library = _tensorboardx()
        if self._open_writer is None:
            # Event files are named by the second: the suffix keeps a quick resume from opening the one before.
            earlier = len(list(self._workdir.glob("events.out.*")))
            self._open_writer = library.event_file_writer.EventsWriter(f"{self._workdir}/events", f".{earlier}")
            if self._config is not None and not earlier:
                lines = json.dumps(self._config, indent=1).splitlines()
                self._add(0, library.summary.text("config", "\n".join(f"    {line}" for line in lines)))
        event = library.proto.event_pb2.Event(summary=summary, step=step, wall_time=time.time())
        self._open_writer.write_event(event)

    def config(self, config: Row) -> None:
        """Written as text with the first metrics of a DIR; a resumed run has the same configuration."""
        self._config = config

    def metrics(self, step: int, row: Row) -> None:
        for name, value in scalars(row).items():
            self._add(step, _tensorboardx().summary.scalar(name, value))
        self._flush()

    def _flush(self) -> None:
        if self._open_writer is not None:
            self._open_writer.flush()

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        for name, held_out in (("samples/train", False), ("samples/test", True)):
            some = [row for row in rows if (row.get("split") == "test") == held_out]
            if some:  # TensorBoard renders Markdown; text that is indented stays as it is
                text = "\n\n".join("    " + json.dumps(row, ensure_ascii=False) for row in some)
                self._add(step, _tensorboardx().summary.text(name, text))
        self._flush()

    def cut(self, step: int) -> None:
        """Remove every record later than `step`, broken ends, and files that keep no record.

        A file with a record that is none is kept beside it as damaged.NAME. TensorBoard's purge_step would only hide
        the old rows, and only from some readers. Wall times stay.
        """
        self.close()
        for path in self._workdir.glob("events.out.*"):
            kept = list(_records(path, step))
            if not any(event.HasField("summary") for event, _ in kept):
                path.unlink()
                continue
            part = path.with_name(f"part.{path.name}")
            part.write_bytes(b"".join(record for _, record in kept))
            os.replace(part, path)

    def close(self) -> None:
        writer, self._open_writer = self._open_writer, None
        if writer is not None:
            writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases under the name of the DIR, which keeps its id in `wandb_id` and so continues it.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ValueError: it refuses the run, as without a login.
    """

    def __init__(self, project: str, workdir: Path):
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"log.wandb={project!r} needs the wandb package: pip install 'jaxrl_llm[wandb]', or set log.wandb=''"
            ) from error
        known = workdir / "wandb_id"
        if not known.exists():
            known.write_text(uuid.uuid4().hex[:12])
        self._table = wandb.Table
        try:
            self._run = wandb.init(
                project=project,
                name=workdir.resolve().name,
                dir=str(workdir),
                id=known.read_text().strip(),
                resume="allow",
                settings=wandb.Settings(silent=True),
            )
        except Exception as error:  # its own classes, which share no base
            raise ValueError(
                f"log.wandb={project!r} cannot start a run ({error}); log in with `wandb login`, set "
                "WANDB_MODE=offline, or set log.wandb=''"
            ) from error

    def config(self, config: Row) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def metrics(self, step: int, row: Row) -> None:
        self._run.log(scalars(row), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
        cells: list[Any] = [[json.dumps(row.get(key), ensure_ascii=False) for key in columns] for row in rows]
        self._run.log({"samples": self._table(columns=columns, data=cells)}, step=step)

    def cut(self, step: int) -> None:
        """Do nothing: rows that were sent stay there, and Weights & Biases ignores a step that it already has."""

    def close(self) -> None:
        self._run.finish()


def _records(path: Path, last_step: int) -> Iterator[tuple[Any, bytes]]:
    """The records (length u64, crc u32, data, crc u32) of an event file up to a step, without a broken end."""
    event_pb2, start, content = _tensorboardx().proto.event_pb2, 0, path.read_bytes()
    while start + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, start)
        end = start + 12 + length + 4
        if end > len(content):
            return
        try:
            event = event_pb2.Event.FromString(content[start + 12 : end - 4])
        except Exception:  # protobuf's own class, which it has moved before
            path.with_name(f"damaged.{path.name}").write_bytes(content)
            return
        if not event.HasField("summary") or event.step <= last_step:
            yield event, content[start:end]
        start = end
