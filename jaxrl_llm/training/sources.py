"""Sources of a run's batches: one for each kind of data that an objective reads."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxrl_llm.ground import processes
from jaxrl_llm.ground.array_typing import Array
from jaxrl_llm.objectives import AnyObjective
from jaxrl_llm.records.saved_trees import load_tree, save_tree
from jaxrl_llm.training.collect import Draw
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.state import TrainState


@runtime_checkable
class Source(Protocol):
    """Draws the data of a step; a value without state, which is all in the stream."""

    def stream(self) -> Any:
        """An endless iterator over the data with `get_state` and `set_state`: its state is part of a checkpoint."""
        ...

    def read_data(self) -> str:
        """Describe the data in a line ("" if the task says it by itself); they are written if need be.

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

    def next(self, stream: Any, step: int, state: TrainState) -> Draw:
        """Return what step `step` learns from, with `state` as the old policy."""
        ...

    def in_flight(self, stream: Any) -> list[Any]:
        """Return what a checkpoint holds beside the state and that of the stream: trees of arrays of coming steps."""
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
    the policy serves it too. Without them it is kept in `source.reference_dtype`, as far as that holds it exactly.
    """
    if start is None or "ref_logprobs" not in objective.needs:
        return source
    if start.base is not None:
        return dataclasses.replace(source, reference=start.policy.copy())
    params = in_type(start.policy.trained, source.reference_dtype)
    if folder is None:
        return dataclasses.replace(source, reference=Policy(params).copy())
    save_tree(folder, params)
    return dataclasses.replace(source, reference=Policy(load_tree(folder, params)))


def in_type(params: Any, dtype: str) -> Any:
    """The parameters in a narrower type; an array that it does not hold exactly stays as it is."""

    def of(x: Array) -> Array:
        if x.dtype.itemsize <= jnp.dtype(dtype).itemsize:
            return x
        rounded = x.astype(dtype)  # by itself: inside one program the compiler may leave a rounding out
        return rounded if processes.fetch(jnp.all(rounded == x)) else x

    return jax.tree.map(of, params)
