"""Weights & Biases, for a run that sets `log.wandb`: what TensorBoard gets, under the same names."""

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.records.writers import Row, scalars


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
