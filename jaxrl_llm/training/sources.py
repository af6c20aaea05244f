"""Where the batches of a run come from: one source for each kind of data that an objective reads."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.records.checkpointing import load_tree, save_tree
from jaxrl_llm.training.layout import Layout
from jaxrl_llm.training.state import TrainBatch, TrainState
from jaxrl_llm.training.step import Learner

__all__ = ["Drawn", "Source", "learn", "start_policy"]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What one step learns from.

    epochs: the micro-batches of every minibatch, by epoch. metrics: still on the devices. host: numbers already here.
    samples: rows that a person can read.
    """

    batch: TrainBatch
    epochs: list[list[Layout]]
    metrics: dict[str, M.Metric] = dataclasses.field(default_factory=dict)
    host: dict[str, float] = dataclasses.field(default_factory=dict)
    samples: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@runtime_checkable
class Source(Protocol):
    """Draws the data of a step; a value without state, which is all in the stream.

    `frozen` is what the learner combines with trained parameters (`Learner.policy`).
    """

    def stream(self) -> Any:
        """An endless iterator over the data with `get_state` and `set_state`: its state is part of a checkpoint."""
        ...

    def read_data(self) -> str:
        """What there is to learn from, in a line ("" for what the task says by itself); data are written if need be.

        Raises:
          ValueError: data are missing or do not fit.
        """
        ...

    def reference(self, start: TrainState | None, frozen: Any, folder: Path) -> Any:
        """What a source keeps of the start of the run, stored in `folder` so that a resume uses the same; None for
        nothing.

        start: None where all of it lies there already.
        """
        ...

    def next(
        self, stream: Any, step: int, state: TrainState, reference: Any, frozen: Any, exported: Callable[[], Any]
    ) -> Drawn:
        """What step `step` learns from. exported: makes the whole policy in plain parameters, for sampling."""
        ...

    def evaluate(self, state: TrainState, reference: Any, frozen: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """({"eval/...": value}, rows to read) of the held-out data that this source alone has."""
        ...


def learn(
    learner: Learner, state: TrainState, drawn: Drawn, frozen: Any = None
) -> tuple[TrainState, list[dict[str, M.Metric]]]:
    """The state after one update a minibatch, in every epoch, and the metrics of each update, still on the devices."""
    updates = []
    for layout in (layout for epoch in drawn.epochs for layout in epoch):
        state, metrics = learner.update(state, drawn.batch, layout, frozen)
        updates.append(metrics)
    return state, updates


def start_policy(learner: Learner, start: Any, frozen: Any, folder: Path) -> Any:
    """Parameters of pi_ref, the policy before the first update; None where the objective reads no reference.

    With adapters it is the base, that is adapters that change nothing: no file is needed, and the program that scores
    the policy serves it too.
    """
    if "ref_logprobs" not in learner.objective.needs:
        return None
    if frozen is not None:
        return jax.tree.map(lambda x: x.copy(), start.params)
    save_tree(folder, start.params)
    return load_tree(folder, start.params)
