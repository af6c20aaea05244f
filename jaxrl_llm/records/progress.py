"""How far a run is between two lines: what is compiled, and how many answers of a rollout or an evaluation are there.

A rollout is one compiled program, which tells the host nothing before its end. So answers are counted by the clock,
against the seconds that the last such phase took or that an estimate gives it, and are said to be about so many.
"""

import contextlib
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from jaxrl_llm.ground import phases

# The programs of a run: name of the compiled function -> name on the screen.
PROGRAMS = {
    "_prepare": "move of the parameters",
    "_generate": "rollout",
    "_score": "scoring",
    "_update": "update",
    "_describe": "routing diagnostics",
    "init_fn": "model",
}
SILENCE = 60.0  # seconds without a line, after which a log gets one
TICK = 1.0  # seconds between two looks at the clock


class Progress:
    """Follows the phases of this process and what JAX compiles in them."""

    def __init__(self) -> None:
        self.compiling = ""  # the program, as a screen names it
        self.compiled = 0.0  # seconds of compilation so far
        self.expected: dict[str, float] = {}  # seconds of phases about answers, by name
        self._changed = time.monotonic()  # when the last compilation of a program began or ended
        if "jax" in sys.modules:  # otherwise nothing compiles here
            _listen()
        _OPEN.add(self)

    def close(self) -> None:
        """Safe to call twice."""
        _OPEN.discard(self)

    def heard(self, event: str, seconds: float, name: str) -> None:
        """JAX reports that a program was lowered and is compiled next, or that it has been compiled."""
        if event.endswith("jaxpr_to_mlir_module_duration"):
            if name in PROGRAMS:
                self.compiling, self._changed = PROGRAMS[name], time.monotonic()
        elif event.endswith("backend_compile_duration"):
            self.compiled += seconds
            if name in PROGRAMS:
                self.compiling, self._changed = "", time.monotonic()

    def ended(self, phase: phases.Phase) -> None:
        """A phase has ended; the next one of its name is expected to take as long."""
        if phase.answers:
            self.expected[phase.name] = self._running(phase)

    def text(self, least: float = 0.0) -> str:
        """Say what is done, how far it is and for how long; "" if it has lasted less than `least` seconds."""
        stack = phases.under_way()
        within = f"{stack[0].name}: " if len(stack) > 1 or (stack and self.compiling) else ""
        if self.compiling:
            return f"{within}compiling {self.compiling} ... {clock(time.monotonic() - self._changed)}"
        if not stack or (seconds := self._running(phase := stack[-1])) < least:
            return ""
        whole = self.expected.get(phase.name, 0.0)
        if seconds < whole:
            done, left = f" about {int(phase.answers * seconds / whole)}/{phase.answers}", f"<{clock(whole - seconds)}"
        else:
            done, left = f", {phase.answers} answers" if phase.answers else "", ""
        return f"{within}{phase.name}{done} ... {clock(seconds)}{left}"

    def _running(self, phase: phases.Phase) -> float:
        """Seconds in which the phase has run what was compiled for it."""
        return time.monotonic() - max(phase.began, self._changed)


def clock(seconds: float) -> str:
    """00:47 or 1:02:47."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes:02d}:{seconds:02d}"


class Silence:
    """Says what is done once nothing has been said for a minute, and every minute again; `heard` starts it anew."""

    def __init__(self, progress: Progress, say: Callable[[str], None]):
        self._progress, self._say = progress, say
        self._said, self._over = time.monotonic(), threading.Event()
        threading.Thread(target=self._watch, name="progress", daemon=True).start()

    def heard(self) -> None:
        self._said = time.monotonic()

    def close(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(TICK):
            if time.monotonic() - self._said >= SILENCE and (text := self._progress.text()):
                self._say(text)
                self.heard()


@contextlib.contextmanager
def told(say: Callable[[str], None]) -> Iterator[Progress]:
    """Have `say` told every minute what is being done in here."""
    progress = Progress()
    silence = Silence(progress, say)
    try:
        yield progress
    finally:
        silence.close()
        progress.close()


_OPEN: "weakref.WeakSet[Progress]" = weakref.WeakSet()


def _ended(phase: phases.Phase) -> None:
    for progress in list(_OPEN):
        progress.ended(phase)


phases.listeners.append(_ended)


@functools.cache
def _listen() -> None:
    """Tell everyone who is open what JAX compiles; once per process, since listeners cannot be removed."""
    import jax  # here, so that a sweep does without it

    def heard(event: str, duration_secs: float, **known: object) -> None:
        if event.startswith("/jax/core/compile/"):
            name = str(known.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            for progress in list(_OPEN):
                progress.heard(event, duration_secs, name)

    jax.monitoring.register_event_duration_secs_listener(heard)
