"""Where a run's metrics and samples go besides its .jsonl files: TensorBoard and, if set, Weights & Biases.

Both get scalars under the keys of metrics.jsonl, lists by layer as one scalar a layer (`name/0`, `name/1`, ...), the
samples as text and the configuration. Lists of lists stay in metrics.jsonl alone.
"""

import json
import os
import struct
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["TensorBoard", "WeightsAndBiases", "scalars"]

Row = Mapping[str, Any]


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl, lists of numbers spread out; null and lists of lists are left out."""
    spread: dict[str, float] = {}
    for name, value in row.items():
        values = {f"{name}/{i}": one for i, one in enumerate(value)} if isinstance(value, list) else {name: value}
        spread |= {key: one for key, one in values.items() if isinstance(one, int | float) and name != "step"}
    return spread


def _markdown(rows: Sequence[Row]) -> str:
    """Samples as TensorBoard shows text: indented, so that nothing in an answer is formatting."""
    return "\n\n".join("    " + json.dumps(row, ensure_ascii=False) for row in rows)


def _tensorboardx() -> Any:
    """The package, imported without PyTorch: where that is installed it takes seconds, for the name of a type."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]  # its import fails, which is allowed for
    try:
        import tensorboardX
        import tensorboardX.proto.event_pb2
    finally:
        if hidden:
            del sys.modules["torch"]
    return tensorboardX


class TensorBoard:
    """An event file in the DIR, opened at the first write so that none is empty."""

    def __init__(self, workdir: Path):
        self._workdir = workdir
        self._open_writer: Any = None
        self._config: Row | None = None

    @property
    def _writer(self) -> Any:
        if self._open_writer is None:
            # Event files are named by the second: the suffix keeps a quick resume from opening the one before.
            earlier = len(list(self._workdir.glob("events.out.*")))
            self._open_writer = _tensorboardx().SummaryWriter(
                logdir=str(self._workdir), filename_suffix=f".{earlier}", flush_secs=10
            )
            if self._config is not None and not earlier:
                lines = json.dumps(self._config, indent=1).splitlines()
                self._open_writer.add_text("config", "\n".join(f"    {line}" for line in lines), 0)
        return self._open_writer

    def config(self, config: Row) -> None:
        """As text, with the first metrics of a DIR; a resumed run has the same."""
        self._config = config

    def metrics(self, step: int, row: Row) -> None:
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        held_out = [row for row in rows if row.get("split") == "test"]
        for name, some in (("samples/train", [row for row in rows if row not in held_out]), ("samples/test", held_out)):
            if some:
                self._writer.add_text(name, _markdown(some), step)

    def cut(self, step: int) -> None:
        """Remove every record later than `step`, and broken ends; a file that keeps none goes.

        The files are rewritten record by record (wall times stay) instead of relying on TensorBoard's purge_step, which
        only hides the old rows from some readers.
        """
        self.close()
        for path in self._workdir.glob("events.out.*"):
            kept = list(_records(path.read_bytes(), step))
            if not any(event.HasField("summary") for event, _ in kept):
                path.unlink()
                continue
            part = path.with_name(f"part.{path.name}")
            part.write_bytes(b"".join(record for _, record in kept))
            os.replace(part, path)

    def close(self) -> None:
        if self._open_writer is not None:
            self._open_writer.close()
            self._open_writer = None


class WeightsAndBiases:
    """A run of Weights & Biases under the name of the DIR; the same DIR continues the same run.

    Args:
        project: its name there.
        workdir: the DIR, which keeps the run's id in `wandb_id` and the offline files in `wandb/`.

    Raises:
        ModuleNotFoundError: the package is not installed.
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
        self._run = wandb.init(
            project=project,
            name=workdir.resolve().name,
            dir=str(workdir),
            id=known.read_text().strip(),
            resume="allow",
            settings=wandb.Settings(silent=True),
        )

    def config(self, config: Row) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def metrics(self, step: int, row: Row) -> None:
        self._run.log(scalars(row), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
        cells: list[Any] = [[json.dumps(row.get(key), ensure_ascii=False) for key in columns] for row in rows]
        self._run.log({"samples": self._table(columns=columns, data=cells)}, step=step)

    def cut(self, step: int) -> None:
        """Does nothing: rows that were sent stay there, and Weights & Biases ignores a step that it has already."""

    def close(self) -> None:
        self._run.finish()


def _records(content: bytes, last_step: int) -> Iterator[tuple[Any, bytes]]:
    """The records (length u64, crc u32, data, crc u32) of an event file up to a step, without a broken end."""
    event_pb2, start = _tensorboardx().proto.event_pb2, 0
    while start + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, start)
        end = start + 12 + length + 4
        if end > len(content):
            return
        event = event_pb2.Event.FromString(content[start + 12 : end - 4])
        if not event.HasField("summary") or event.step <= last_step:
            yield event, content[start:end]
        start = end
