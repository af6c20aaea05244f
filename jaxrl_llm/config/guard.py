"""The one guard around every command: what a signal, an error or a fault of the package ends in.

Nothing here imports JAX, so that the guard stands from a command's first instant.
"""

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.command_line import BROKEN_PIPE, FAILED, FAULT, REFUSED, complain
from jaxrl_llm.ground.signals import end_at_once

# What a wrong command line, config, file or machine raises. Anything else is a fault of the package.
_OF_THE_USER = (ValueError, OSError, ImportError, FloatingPointError)
_LESS_MEMORY = (
    "lower updates.micro_batch_rows or rollout.slots, set model.remat=block, or spread the run over more devices with "
    "mesh.shape"
)
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


class Guard:
    """The state of a command, kept for the guard around it."""

    started = False  # from here on an error of the user's input is a failure, exit code 1, and no refusal
    workdir: Path | None = None  # the DIR of a run, which gets the traceback of a fault once the run has started
    onward: Callable[[], str] = staticmethod(lambda: "")  # what follows "stopped by Ctrl-C" in its line


def guarded(work: Callable[[list[str], Guard], int], arguments: Sequence[str] | None = None) -> int:
    """The exit code of `work(arguments, guard)`, as command_line.py lists them; every error ends in one line.

    Without arguments they are those of the process, which is then the command's own: a signal ends it at once, with a
    line, unless the command listens itself (`ground.signals.interruptible`).
    """
    guard, alone = Guard(), True
    if arguments is None:
        end_at_once(lambda: guard.onward())
    try:
        code = work(sys.argv[1:] if arguments is None else list(arguments), guard)
    except KeyboardInterrupt as stop:
        if str(stop):  # a plain one has been reported where it was raised, or is the caller's own
            _say(f"\n{stop}{guard.onward()}")
        code, alone = 128 + getattr(stop, "signal", signal.SIGINT), not getattr(stop, "saved", False)
    except Exception as error:
        gone = isinstance(error, BrokenPipeError) and _reader_is_gone()
        code = BROKEN_PIPE if gone else _complained(error, guard)
    finally:
        whole = _flushed()
    if code == 0 and not whole:
        code = BROKEN_PIPE
    if "jax" in sys.modules:  # otherwise this is no process of several
        from jaxrl_llm.ground import processes

        return processes.leave(code, alone=alone)
    return code


def command(work: Callable[[list[str], Guard], int]) -> Callable[..., int]:
    """The `main(arguments=None)` of a command: `work` under the guard."""
    return functools.wraps(work)(functools.partial(guarded, work))


def _complained(error: Exception, guard: Guard) -> int:
    """Say what went wrong in one line on standard error; returns the exit code."""
    code = FAILED if guard.started else REFUSED
    if isinstance(error, _OF_THE_USER):
        return complain(error, code)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        what = " ".join(str(error).split())[:200]
        return complain(MemoryError(f"out of memory{f' ({what})' if what else ''}; {_LESS_MEMORY}"), FAILED)
    if _of_jax(error):  # of several processes: the hook says which one broke off, and ends this one
        sys.excepthook(type(error), error, error.__traceback__)
        return FAILED
    return _fault(error, guard)


def _of_jax(error: Exception) -> bool:
    jax: Any = sys.modules.get("jax")
    return jax is not None and isinstance(error, jax.errors.JaxRuntimeError) and jax.distributed.is_initialized()


def _fault(error: Exception, guard: Guard) -> int:
    """Say whose fault it is: a file of the user's own, or the package; returns the exit code."""
    import traceback

    from jaxrl_llm.config import about

    what, frames = f"{type(error).__name__}: {error}", traceback.extract_tb(error.__traceback__)
    theirs = {module.__file__ for name, module in sys.modules.items() if name.startswith("file:")}
    known = [frame for frame in frames if frame.filename in theirs or frame.filename.startswith(_PACKAGE)]
    where = f"{(known or frames)[-1].filename}, line {(known or frames)[-1].lineno}"
    if known and known[-1].filename in theirs:  # a config, a sweep, or a task that one of them registers
        return complain(ValueError(f"{where}: {what}; correct the file"), FAILED if guard.started else REFUSED)
    text = f"{' '.join(sys.argv)}\n{about.versions()}\n\n{''.join(traceback.format_exception(error))}"
    place = _written(text, guard.workdir if guard.started else None)
    to = about.address("Issues", "Repository")
    report = f"report it with that file at {to}" if to else f"where to report it is unknown: {about.NO_ADDRESS}"
    return complain(RuntimeError(f"a fault of jaxrl_llm ({where}: {what}); traceback in {place}; {report}"), FAULT)


def _written(text: str, folder: Path | None) -> str:
    """The path of a new file with this text, in the folder if that can be, else in the one for temporary files."""
    import tempfile

    for place in (folder, None):
        with contextlib.suppress(OSError):
            handle, path = tempfile.mkstemp(".txt", "traceback-", place)
            with open(handle, "w") as file:
                file.write(text)
            return path
    sys.stderr.write(text)
    return "the lines above, as no file could be written"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(text, flush=True)


def _reader_is_gone() -> bool:
    import select

    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno())
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except OSError:  # standard output is no file
        return False


def _flushed() -> bool:
    """Return whether standard output took all of its text; if not, the rest goes nowhere until the process ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
