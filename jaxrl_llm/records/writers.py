"""The writer of a run's metrics and samples besides its .jsonl files: TensorBoard. wandb_writer.py has the other.

Both get scalars under the keys of metrics.jsonl, a list as one scalar for each layer (`name/0`, `name/1`, ...), the
samples as text and the configuration. Lists of lists are in metrics.jsonl only.
"""

import json
import time
from collections.abc import Mapping, Sequence
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


class TensorBoard:
    """An event file in the DIR, opened at the first write so that none is empty."""

    def __init__(self, workdir: Path):
        import tensorboardX  # takes seconds where PyTorch is installed: only a run that writes loads it

        self._workdir, self._library = workdir, tensorboardX
        self._open_writer: Any = None
        self._config: Row | None = None
        self._purged: int | None = None  # the first step of earlier event files that no longer counts

    def _add(self, step: int, **kind: Any) -> None:
        """Write one event here and now: the thread of SummaryWriter dies on a full disk, and who flushes it waits."""
        proto: Any = self._library.proto.event_pb2
        if self._open_writer is None:
            # Event files are named by the second: the suffix keeps a quick resume from opening the one before.
            earlier = len(list(self._workdir.glob("events.out.*")))
            self._open_writer = self._library.event_file_writer.EventsWriter(f"{self._workdir}/events", f".{earlier}")
            if earlier and self._purged is not None:
                self._add(self._purged, session_log=proto.SessionLog(status=proto.SessionLog.START))
            if not earlier and self._config is not None:
                lines = json.dumps(self._config, indent=1).splitlines()
                self._text(0, "config", "\n".join(f"    {line}" for line in lines))
        self._open_writer.write_event(proto.Event(step=step, wall_time=time.time(), **kind))

    def _text(self, step: int, name: str, markdown: str) -> None:
        self._add(step, summary=self._library.summary.text(name, markdown))

    def config(self, config: Row) -> None:
        """Written as text with the first metrics of a DIR; a resumed run has the same configuration."""
        self._config = config

    def metrics(self, step: int, row: Row) -> None:
        for name, value in scalars(row).items():
            self._add(step, summary=self._library.summary.scalar(name, value))
        self._flush()

    def _flush(self) -> None:
        if self._open_writer is not None:
            self._open_writer.flush()

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        for name, held_out in (("samples/train", False), ("samples/test", True)):
            some = [row for row in rows if (row.get("split") == "test") == held_out]
            if some:  # TensorBoard renders Markdown; text that is indented stays as it is
                text = "\n\n".join("    " + json.dumps(row, ensure_ascii=False) for row in some)
                self._text(step, name, text)
        self._flush()

    def cut(self, step: int) -> None:
        """Have readers drop every event later than `step` by a new session, the `purge_step` of SummaryWriter."""
        self.close()
        self._purged = step + 1

    def close(self) -> None:
        writer, self._open_writer = self._open_writer, None
        if writer is not None:
            writer.close()
