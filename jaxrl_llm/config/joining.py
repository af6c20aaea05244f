"""Joining the other processes of a run: the wait for them, and the end of one that fails."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed

from jaxrl_llm.config.command_line import FAILED, complain
from jaxrl_llm.ground import processes
from jaxrl_llm.ground.terminal import said_in_one_line


def join_others(place: tuple[Any, ...], start_timeout_s: int, heartbeat_timeout_s: int, *, may_be_alone: bool) -> None:
    """Join the processes of a place, (coordinator, count, index); errors and limits are those of `start_up.join`.

    may_be_alone: nothing says that there are others, as on a TPU host of its own, so that a refusal is none.
    """
    jax.config.update("jax_enable_preemption_service", True)  # `processes.agreed_stop` asks it after every step
    try:
        with _heard(start_timeout_s):
            # JAX would abort with a stack trace, so it has a little longer.
            limit = start_timeout_s + 30
            jax.distributed.initialize(
                *place, initialization_timeout=limit, heartbeat_timeout_seconds=heartbeat_timeout_s
            )
    except ValueError as error:
        if may_be_alone:
            return  # a TPU host of its own
        raise ValueError(f"the processes cannot join ({error}); see docs/several_processes.md") from error
    # The service's listener, in C, has taken SIGTERM unseen by Python: it would swallow it while the run starts.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    uncaught = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, jax.errors.JaxRuntimeError):
            text = said_in_one_line(error, 500)
            where = f"process {jax.process_index()} of {jax.process_count()}"
            lost = "where another process has ended, its own output says why, and the same commands go on"
            print(f"error: {where} failed ({text}); {lost}", file=sys.stderr)
        else:
            uncaught(kind, error, trace)
        processes.leave(1)

    sys.excepthook = end


@contextlib.contextmanager
def _heard(limit_s: int) -> Iterator[None]:
    """While this process waits for the others to join, say so every 15 seconds, and end it after `limit_s`.

    Which of them are missing nobody knows before all are there: JAX's coordinator counts them and tells no one.
    """
    began, joined = time.monotonic(), threading.Event()

    def speak() -> None:
        while not joined.wait(min(15.0, limit_s / 4)):
            waited = time.monotonic() - began
            text = f"{_awaited()} ({waited:.0f} s of processes.start_timeout_s={limit_s})"
            if waited < limit_s:
                print(f"waiting for other processes: {text}", file=sys.stderr, flush=True)
            else:
                complain(TimeoutError(f"not all processes have joined: {text}; see docs/several_processes.md"), FAILED)
                os._exit(FAILED)  # the main thread is inside JAX, which hears no exception

    threading.Thread(target=speak, daemon=True).start()
    try:
        yield
    finally:
        joined.set()


def _awaited() -> str:
    """Which process waits, and what it can know of those that it waits for."""
    state = distributed.global_state
    if state.client is None or state.coordinator_address is None:
        return "the launcher has not yet said where they are"
    here, where = f"this is process {state.process_id} of {state.num_processes}", state.coordinator_address
    silent = "one that prints no such line has not started"
    if state.process_id == 0:
        return f"{here}; {silent}, or cannot reach {where}"
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, ValueError):
        return f"{here}, and nothing answers at {where}: process 0 has not started, or cannot be reached from here"
    return f"{here}, and process 0 answers at {where}; {silent}"
