"""How a run spends its time: shares of the wall clock, speed against the devices' peak, a trace, stacks of a step that
hangs. It watches the run and changes nothing in it."""

import contextlib
import faulthandler
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.ground.peaks import peak_flops
from jaxrl_llm.training.layout import Layout

_PARTS = ("rollouts", "updates", "waiting", "evaluations", "saving", "starts", "lost")
_SLOW = 10  # times the median of the steps before
_LEAST = 60.0  # seconds that every step may take


class Clock:
    """The clock of a run, from its first start on: what is in a row of metrics.jsonl is where a resume goes on from.

    Args:
      workdir: gets the trace. profile: its first and last step, or nothing.
      last: the row that the run resumes after; None at a first start. began: of this process, by time.time().
    """

    def __init__(self, workdir: Path, profile: Sequence[int], last: Mapping[str, Any] | None, began: float):
        self._workdir, self._profile, self._tracing = workdir, profile, False
        before = last or {}
        elapsed = before.get("time/elapsed_s", 0.0)
        self._first = began - elapsed - (lost := max(0.0, began - before.get("time/at", began)))
        self._spent = {part: elapsed * before.get(f"time/share_{part}", 0.0) for part in _PARTS}
        self._spent["lost"] += lost
        self._spent["starts"] += time.time() - began
        self._steps: list[float] = []
        self._began, self._rows, self.at = began, 0, 0  # at: the step under way

    @contextlib.contextmanager
    def spends(self, part: str) -> Iterator[None]:
        """The time of what is in here belongs to this part."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._spent[part] += time.monotonic() - start

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around the work of a step: the trace, and all stacks on standard error if it takes ten times the median."""
        if self._profile and not self._tracing and self._profile[0] <= step <= self._profile[1]:
            jax.profiler.start_trace(self._workdir / "profile")
            self._tracing = True
        self.at = step
        start = time.monotonic()
        if len(self._steps) > 1:  # the first compiles
            limit = max(_LEAST, _SLOW * statistics.median(self._steps))
            faulthandler.dump_traceback_later(limit, file=sys.__stderr__ or sys.stderr)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._steps.append(time.monotonic() - start)
            if self._tracing and step >= self._profile[1]:
                self.close()

    def close(self) -> None:
        """End a trace that is under way."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False

    def row(self, host: Mapping[str, Any]) -> dict[str, float]:
        """Return the times since the run began for a step's row, with what `host` has of the step itself."""
        rollout, waiting = host.get("time/rollout_s", 0.0), host.get("time/verifier_s", 0.0)
        for part, seconds in (
            ("rollouts", rollout),
            ("waiting", waiting),
            ("updates", host["time/update_s"] - waiting),
        ):
            self._spent[part] += seconds
        now = time.time()
        elapsed = max(now - self._first, 1e-9)
        shares = {f"time/share_{part}": seconds / elapsed for part, seconds in self._spent.items()}
        if not self._rows:
            shares["time/to_first_update_s"] = now - self._began
        self._rows += 1
        good = shares["time/share_rollouts"] + shares["time/share_updates"]
        return shares | {"time/goodput": good, "time/elapsed_s": elapsed, "time/at": now}


def speed(
    epochs: Sequence[Sequence[Layout]], parameters: int, forwards: int, seconds: float, mesh: Any
) -> dict[str, float]:
    """Tokens a second and device of a step, and the share of the devices' peak that its model FLOPs are.

    These are 2 x parameters for every token of a forward and 6 of an update, without attention and recomputation.

    Args:
      epochs: the layouts of each. parameters: active ones.
      forwards: over the step's tokens, beside the updates: rollout and scores. mesh: the run's.
    """
    walks = [sum(np.count_nonzero(np.asarray(layout.segment_ids)) for layout in walk) for walk in epochs]
    found = {"time/tokens_per_s_per_device": walks[0] / seconds / mesh.size}
    if peak := peak_flops(mesh.devices.flat[0].device_kind):
        flops = parameters * (2.0 * forwards * walks[0] + 6.0 * sum(walks))
        found["time/mfu"] = flops / (seconds * mesh.size * peak)
    return found
