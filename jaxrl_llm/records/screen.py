"""The display of a run: live progress on a terminal, one plain line per step anywhere else.

A terminal shows two lines at its lower end that never wrap: the bar with the time, and the newest numbers. Evaluations,
notes and the lines at the start and the end of a run scroll by above. While a program is being compiled its name stands
in place of the numbers, and steps that compiled do not count in the estimate of the remaining time. A rollout, or what
else goes on for seconds, has a third line; elsewhere it has one a minute while nothing else is printed.
"""

import contextlib
import io
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxrl_llm.ground.terminal import visible, wrapped
from jaxrl_llm.records.progress import Progress, Silence, clock

_SHORT = 0.2  # seconds of compilation that a step may have and still count for the estimate
_LASTS = 2.0  # seconds after which what goes on is shown


class Screen:
    """Progress of one run on `stream`, by default standard output; nothing is shown with write=False."""

    def __init__(self, total_steps: int, *, stream: io.TextIOBase | None = None, write: bool = True):
        self.total_steps = total_steps
        self._stream: Any = _Terminal(sys.stdout if stream is None else stream)
        self._write = write
        self._row: dict[str, Any] = {"step": 0}
        self._clock = _Clock(total_steps)
        self.progress = Progress()
        self._live: Live | None = None
        self._silence: Silence | None = None
        if write and self._stream.isatty():
            console = Console(file=self._stream, highlight=False, soft_wrap=False)
            self._live = Live(get_renderable=self._display, console=console, refresh_per_second=4)

    def note(self, text: str) -> None:
        text = visible(text)
        if self._live is not None:
            self._live.console.print(Text(wrapped(text, self._live.console.width)), soft_wrap=True)
        elif self._write:
            self._stream.write(f"{text}\n")
            self._stream.flush()
            if self._silence is not None:
                self._silence.heard()

    def step(self, row: Mapping[str, Any]) -> None:
        """Show the metrics of a step, "step" among them, as they go to metrics.jsonl."""
        self._row = dict(row)
        self._clock.step(row["step"], self.progress.compiled)
        if self._live is None:
            parts = [f"step {row['step']}/{self.total_steps}", *_numbers(row), self._clock.text()]
            self.note("  ".join(filter(None, parts)))
            return
        self._live.start()
        if any(name.startswith("eval/") for name in row):
            passed = "  ".join([f"step {row['step']}", *_numbers(row)])
            self._live.console.print(Text(passed, no_wrap=True, overflow="ellipsis"))
        self._live.refresh()

    def begin(self) -> None:
        """From now on show what goes on, also where nothing comes of it for long."""
        if self._live is not None:
            self._live.start()
        elif self._write:
            self._silence = Silence(self.progress, self.note)

    def end(self, text: str) -> None:
        """Show lines below the last state of the display."""
        self.close()
        self.note(text)

    def close(self) -> None:
        """Leave the last state of the display on the terminal; safe to call twice."""
        self.progress.close()
        if self._silence is not None:
            self._silence.close()
        if self._live is not None:
            self._live.stop()

    def _display(self) -> Group:
        step = self._row["step"]
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        filled = ProgressBar(total=max(self.total_steps, 1), completed=step)
        bar.add_row(f"step {step}/{self.total_steps}", filled, self._clock.text() or self._clock.elapsed())
        lines = ["  ".join(_numbers(self._row)), self.progress.text(_LASTS)]
        return Group(bar, *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines if line))


class _Terminal:
    """A stream that may be closed from outside: what a run prints then goes nowhere, and the run goes on."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


class _Clock:
    """Time since the first step, and the remaining time, estimated from steps that compiled nothing."""

    def __init__(self, total_steps: int):
        self._total = total_steps
        self._began = time.monotonic()
        self._last: tuple[int, float, float] | None = None  # step, time, seconds compiled by then
        self._steps, self._seconds = 0, 0.0

    def step(self, step: int, compiled: float) -> None:
        """A step has ended, after so many seconds of compilation since the beginning."""
        now = time.monotonic()
        if self._last is not None:
            before, then, compiled_then = self._last
            if compiled - compiled_then < _SHORT:
                self._steps += step - before
                self._seconds += now - then
        self._last = (step, now, compiled)

    def elapsed(self) -> str:
        return clock(time.monotonic() - self._began)

    def text(self) -> str:
        """00:12<01:03: elapsed and remaining time; empty before a step without compilation has ended."""
        if self._last is None or not self._steps:
            return ""
        left = self._seconds / self._steps * max(self._total - self._last[0], 0)
        return f"{self.elapsed()}<{clock(left)}"


def _numbers(row: Mapping[str, Any]) -> list[str]:
    given = not {"reward/mean", "pairs/accuracy"} & row.keys()  # supervised training has a loss and nothing to clip
    clipped = [row[k] for k in ("clip/low", "clip/high") if row.get(k) is not None and not given]
    shown = {
        "reward": ("{:.3f}", row.get("reward/mean")),
        "loss": ("{:.3f}", row.get("loss/policy") if given else None),
        "pairs": ("{:.3f}", row.get("pairs/accuracy")),
        "held-out": ("{:.3f}", row.get("eval/greedy")),
        "held-out pairs": ("{:.3f}", row.get("eval/pair_accuracy")),
        "length": ("{:.1f}", row.get("rollout/length_mean")),
        "clip": ("{:.2%}", sum(clipped) if clipped else None),
        "tokens/s": ("{:,.0f}", row.get("rollout/tokens_per_s")),
    }
    return [f"{name} {form.format(value)}" for name, (form, value) in shown.items() if value is not None]
