"""Where the batches of a run come from: one source for each kind of data that an objective reads."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.objectives import AnyObjective
from jaxrl_llm.records.checkpointing import load_tree, save_tree
from jaxrl_llm.training.layout import Layout
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.state import TrainBatch, TrainState


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What one step learns from."""

    batch: TrainBatch
    epochs: list[list[Layout]]  # the micro-batches of every minibatch
    metrics: dict[str, M.Metric] = dataclasses.field(default_factory=dict)  # still on the devices
    host: dict[str, float] = dataclasses.field(default_factory=dict)
    samples: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # rows that a person can read


@runtime_checkable
class Source(Protocol):
    """Draws the data of a step; a value without state, which is all in the stream."""

    def stream(self) -> Any:
        """An endless iterator over the data with `get_state` and `set_state`: its state is part of a checkpoint."""
        ...

    def read_data(self) -> str:
        """What there is to learn from, in a line ("" for what the task says by itself); data are written if need be.

        Raises:
          ValueError: data are missing or do not fit.
        """
        ...

    def started(self, start: TrainState | None, folder: Path | None) -> "Source":
        """The source with what it keeps of the start of the run (a reference policy, or its log-probs).

        Args:
          start: the state before the first update; None if `folder` already holds everything.
          folder: where it is stored, so that a resume uses the same; None: nowhere.
        """
        ...

    def next(self, stream: Any, step: int, state: TrainState) -> Drawn:
        """What step `step` learns from, with `state` as the old policy."""
        ...

    def in_flight(self, stream: Any) -> list[Any]:
        """What a checkpoint holds beside the state and that of the stream: trees of arrays of coming steps."""
        return []

    def in_flight_like(self, state: TrainState) -> list[Any]:
        """The shapes and shardings of `in_flight` in any checkpoint of the run."""
        return []

    def resume(self, stream: Any, place: Any, in_flight: Sequence[Any] = ()) -> None:
        """Bring the stream to where a checkpoint was written, from its state and what was in flight."""
        stream.set_state(place)

    def evaluate(self, state: TrainState) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """({"eval/...": value}, rows to read) of the held-out data that this source alone has."""
        return {}, []


def with_reference(source: Any, objective: AnyObjective, start: TrainState | None, folder: Path | None) -> Any:
    """The source with pi_ref, the policy before the first update, if the objective reads its log-probs.

    With adapters it is the base, that is adapters that change nothing: no file is needed, and the program that scores
    the policy serves it too.
    """
    if start is None or "ref_logprobs" not in objective.needs:
        return source
    if start.base is not None or folder is None:
        return dataclasses.replace(source, reference=start.policy.copy())
    save_tree(folder, start.policy.trained)
    return dataclasses.replace(source, reference=Policy(load_tree(folder, start.policy.trained)))
