"""A run's rows, evaluations and estimates, on their way to its log."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.records.run_log import RunLog
from jaxrl_llm.run.assembly import Run
from jaxrl_llm.run.clock import Clock
from jaxrl_llm.run.forecast import forecast
from jaxrl_llm.training.pending import Pending


class Reports:
    """Rows of a run for its log; that of a step is held until the next step runs, as its metrics are on the devices.

    Args:
      step: the next one to train.
    """

    def __init__(self, run: Run, log: RunLog, clock: Clock, step: int):
        self._log, self._clock, self._late = log, clock, None
        self._expected, self._forecast, self._step = log.screen.progress.expected, forecast(run), step
        self._expected |= {"evaluating": self._forecast.evaluation, "rollout": self._forecast.rollout}

    def estimate(self, last: Mapping[str, Any] | None) -> None:
        """Say how long the next step takes, by the last row of a run that goes on, or by the evaluation before it."""
        ahead = self._forecast.as_before(last) if last else self._forecast.as_fast_as(self._expected["evaluating"])
        self._expected["rollout"] = ahead.rollout
        self._log.note(ahead.line(self._step))

    def step(self, row: Pending) -> None:
        """Log the row that is held, and hold this one."""
        self.flush()
        row.host |= self._clock.row(row.host)
        self._late = row

    def evaluation(self, step: int, metrics: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Log held-out answers, and the metrics in the row that is held or, before the first step, in one of theirs."""
        self._log.samples(step, rows)
        if self._late is None:
            self._log.metrics(step, metrics)
        else:
            self._late.host |= metrics

    def flush(self) -> None:
        """Log the row that is held, after its checks."""
        late, self._late = self._late, None
        if late is not None:
            late.write(self._log)
