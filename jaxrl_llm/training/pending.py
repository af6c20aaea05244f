"""The row of a step: its metrics are fetched while the next step runs, checked and logged."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground import processes
from jaxrl_llm.records.run_log import RunLog
from jaxrl_llm.training.checks import check_updates

__all__ = ["Pending"]


@dataclasses.dataclass
class Pending:
    """The metrics of a step that are still on the devices, and what the host knows already.

    scored: of what the step learns from; updates: of each update. bounds: what `check_updates` is told of the run.
    """

    step: int
    host: dict[str, Any]
    scored: dict[str, M.Metric]
    updates: list[dict[str, M.Metric]]
    samples: list[dict[str, Any]]
    bounds: Mapping[str, Any]

    @functools.cached_property
    def _fetched(self) -> tuple[dict[str, M.Metric], list[dict[str, M.Metric]]]:
        return processes.fetch((self.scored, self.updates))

    def row(self) -> dict[str, Any]:
        """All that is known of the step; waits for its updates."""
        scored, updates = self._fetched
        each = [M.finalize(update) for update in updates]
        values = M.finalize(M.merge([scored, *updates])) | {
            key: value
            for key, value in each[0].items()
            if key.startswith("check/")  # only the first update's
        }
        name = "routing/flips_old_current_by_layer"
        if name in values:
            values["routing/flips_old_current_by_update"] = [update[name] for update in each]  # pyright: ignore
            # The first update has the same parameters as the scoring pass, so that any difference is rounding.
            values["routing/flips_numeric"] = each[0]["routing/flips_old_current"]
        return {**values, **self.host}

    def check(self) -> None:
        """Raises as `check_updates` does."""
        scored, updates = self._fetched
        check_updates(self.step, M.finalize(scored), [M.finalize(update) for update in updates], **self.bounds)

    def write(self, log: RunLog) -> None:
        """Log the step, then check it."""
        log.metrics(self.step, self.row())
        self.check()
        log.samples(self.step, self.samples)
