"""The display of a run: live progress on a terminal, one plain line per step anywhere else.

A terminal shows two lines at its lower end that never wrap: the bar with the time, and the newest numbers. Evaluations,
notes and the lines at the start and the end of a run scroll by above. While a program is being compiled its name stands
in place of the numbers, and steps that compiled do not count in the estimate of the remaining time.
"""

import contextlib
import functools
import io
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxrl_llm.ground.terminal import visible

# The programs of a run: name of the compiled function -> name on the screen.
PHASES = {
    "_prepare": "move of the parameters",
    "_generate": "rollout",
    "_score": "scoring",
    "_update": "update",
    "_describe": "routing diagnostics",
    "init_fn": "model",
}
_SHORT = 0.2  # seconds of compilation that a step may have and still count for the estimate


class Screen:
    """Progress of one run on `stream`, by default standard output; nothing is shown with write=False."""

    def __init__(self, total_steps: int, *, stream: io.TextIOBase | None = None, write: bool = True):
        self.total_steps = total_steps
        self._stream: Any = _Terminal(sys.stdout if stream is None else stream)
        self._write = write
        self._row: dict[str, Any] = {"step": 0}
        self._clock = _Clock(total_steps)
        self._compiling = ""
        self._live: Live | None = None
        if write and self._stream.isatty():
            console = Console(file=self._stream, highlight=False, soft_wrap=False)
            self._live = Live(get_renderable=self._display, console=console, refresh_per_second=4)
        if "jax" in sys.modules:  # otherwise nothing compiles here
            _listen()
        _OPEN.add(self)

    def note(self, text: str) -> None:
        text = visible(text)
        if self._live is not None:
            self._live.console.print(Text(text), soft_wrap=True)
        elif self._write:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def step(self, row: Mapping[str, Any]) -> None:
        """Show the metrics of a step, "step" among them, as they go to metrics.jsonl."""
        self._row = dict(row)
        self._clock.step(row["step"])
        if self._live is None:
            parts = [f"step {row['step']}/{self.total_steps}", *_numbers(row), self._clock.text()]
            self.note("  ".join(filter(None, parts)))
            return
        self._live.start()
        if any(name.startswith("eval/") for name in row):
            passed = "  ".join([f"step {row['step']}", *_numbers(row)])
            self._live.console.print(Text(passed, no_wrap=True, overflow="ellipsis"))
        self._live.refresh()

    def compiled(self, event: str, seconds: float, name: str) -> None:
        """JAX reports that a program was lowered and is compiled next, or that it has been compiled."""
        if event.endswith("jaxpr_to_mlir_module_duration"):
            self._compiling = PHASES.get(name, self._compiling)
            if self._compiling and self._live is not None:
                self._live.start()
        elif event.endswith("backend_compile_duration"):
            self._compiling = "" if name in PHASES else self._compiling
            self._clock.compiled += seconds

    def end(self, text: str) -> None:
        """Show lines below the last state of the display."""
        self.close()
        self.note(text)

    def close(self) -> None:
        """Leave the last state of the display on the terminal; safe to call twice."""
        _OPEN.discard(self)
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
        words = f"compiling {self._compiling} ..." if self._compiling else "  ".join(_numbers(self._row))
        return Group(bar, Text(words, no_wrap=True, overflow="ellipsis"))


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
        self.compiled = 0.0  # seconds of compilation, counted up from outside
        self._total = total_steps
        self._began = time.monotonic()
        self._last: tuple[int, float, float] | None = None  # step, time, seconds compiled by then
        self._steps, self._seconds = 0, 0.0

    def step(self, step: int) -> None:
        now = time.monotonic()
        if self._last is not None:
            before, then, compiled = self._last
            if self.compiled - compiled < _SHORT:
                self._steps += step - before
                self._seconds += now - then
        self._last = (step, now, self.compiled)

    def elapsed(self) -> str:
        return _clock(time.monotonic() - self._began)

    def text(self) -> str:
        """00:12<01:03: elapsed and remaining time; empty before a step without compilation has ended."""
        if self._last is None or not self._steps:
            return ""
        left = self._seconds / self._steps * max(self._total - self._last[0], 0)
        return f"{self.elapsed()}<{_clock(left)}"


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


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes:02d}:{seconds:02d}"


_OPEN: "weakref.WeakSet[Screen]" = weakref.WeakSet()


@functools.cache
def _listen() -> None:
    """Tell the open screens what JAX compiles; once per process, since listeners cannot be removed."""
    import jax  # here, so that a sweep does without it

    def heard(event: str, duration_secs: float, **known: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            name = str(known.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            for screen in list(_OPEN):
                screen.compiled(event, duration_secs, name)

    jax.monitoring.register_event_duration_secs_listener(heard)
