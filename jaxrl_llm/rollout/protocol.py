"""What every rollout engine offers, whether it samples on the trainer's devices or on servers."""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from jaxrl_llm.ground.array_typing import Array, Integer, Key, Params
from jaxrl_llm.rollout.trajectory import Trajectory


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples groups of answers to prompts, with the weights that it was given last: `rollout.engine.Engine` and
    `rollout.remote.RemoteEngine`."""

    remote: ClassVar[bool]  # whether it answers while the devices train, and takes weights in the middle of its answers

    @property
    def group_size(self) -> int: ...

    @property
    def max_new_tokens(self) -> int: ...

    def take_weights(self, params: Params, version: int) -> tuple[Any, Mapping[str, float]]:
        """(what `generate` samples with, metrics of bringing it there) of the policy of so many steps."""
        ...

    def generate(
        self,
        prepared: Any,
        /,
        prompts: Integer[Array | np.ndarray, "p tp"],
        lengths: Integer[Array | np.ndarray, "p"],
        uids: Integer[Array | np.ndarray, "p"],
        key: Key,
        limits: Integer[Array | np.ndarray, "b"] | None = None,
    ) -> Trajectory:
        """`group_size` answers to every prompt, from what `take_weights` returned; see `Engine.generate`."""
        ...

    def release(self, prepared: Any, params: Params, /) -> None:
        """Free what `take_weights` made of these parameters."""
        ...
