"""The signals that end a run or a command while the main thread is in C, as it is inside XLA for minutes.

What they do while Python runs, and which line and code a command ends with, is in config/test_guard.py.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from jaxrl_llm.ground import signals
from jaxrl_llm.ground.signals import ending_signals, interruptible
from tests.reference.waiting import until

ROOT = Path(__file__).parents[2]
SOON = 5.0  # seconds, on a busy machine; the C call below takes minutes
FINISHING = "finishing step 3 and saving; again ends now\n"
# Like XLA it gives the interpreter's lock back and does not return to Python when a signal comes.
IN_C = 'hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)'
START = f"""
import hashlib, os, signal, subprocess, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup` changes
signal.signal(signal.SIGINT, signal.default_int_handler)  # and a shell in the background
from jaxrl_llm.config.guard import guarded
from jaxrl_llm.ground.signals import interruptible
def finishing():
    return {FINISHING.strip()!r}
def work(arguments, guard):
    guard.onward = lambda: "; more"
"""


@contextlib.contextmanager
def child(*body, **options):
    """A process whose command has this body; killed in the end, with all that it has started."""
    code = START + "".join(f"    {line}\n" for line in body) + "sys.exit(guarded(work))"
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with psutil.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **given) as process:
        family = [process]
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                family += process.children(recursive=True)
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_that_is_in_c(number):
    with child("print('ready', flush=True)", IN_C) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(SOON) == 128 + number
        name = {signal.SIGINT: "Ctrl-C"}.get(number, number.name)
        assert process.stderr.read() == f"stopped by {name}; more\n"


def test_the_first_signal_is_answered_at_once_and_the_second_ends_a_run_with_its_workers():
    """The first goes to the process group, as from a terminal; a worker has started a process that ignores signals."""
    stubborn = "trap '' INT TERM HUP; while :; do sleep 1; done"
    with child(
        "from jaxrl_llm.ground.workers import Pool",
        "import pickle, threading",
        f"ask = ('verify', pickle.dumps(subprocess.call), 1e3, [(['bash', '-c', {stubborn!r}],)])",
        "threading.Thread(target=Pool(1, 2**33).ask, args=ask, daemon=True).start()",
        "with interruptible(finishing):",
        "    print('ready', flush=True)",
        f"    {IN_C}",
        start_new_session=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        until(lambda: any(one.name() == "bash" for one in process.children(recursive=True)))
        family = process.children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr.readline() == FINISHING
        assert {one.pid for one in family} <= {one.pid for one in process.children(recursive=True)}
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON) == 143
        assert process.stderr.read() == "stopped by SIGTERM; more\n"
        assert psutil.wait_procs(family, SOON)[1] == []


def test_a_signal_to_a_forked_child_is_its_own():
    """The descriptor that signals are written to is inherited; the parent would take the child's for its own."""
    with child(
        "forked = os.fork()",
        "if not forked: time.sleep(1000)",
        "time.sleep(0.2)",
        "os.kill(forked, signal.SIGTERM)",
        "print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), flush=True)",
        "time.sleep(0.2)",
        "return 0",
    ) as process:
        assert process.wait(4 * SOON) == 0
        assert (process.stdout.read(), process.stderr.read()) == ("-15\n", "")


def test_a_command_inside_a_run_takes_no_signal_from_it(monkeypatch):
    """What ends a process at once stays behind the run that is told first, however often it is set."""
    hearers = []
    monkeypatch.setattr(signals, "_hearers", hearers)
    monkeypatch.setattr(signals, "_listen", lambda: lambda: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    signals.end_at_once()
    (first,) = hearers
    with interruptible():
        run = hearers[-1]
        signals.end_at_once()
        assert hearers[1:] == [run]
        assert hearers[0] is not first
    assert len(hearers) == 1


def test_a_second_signal_does_what_is_to_be_done_at_once_and_ends_the_command(monkeypatch):
    """The first is the run's alone, and the main thread knows its number once it is back in Python."""
    told, handlers = [], {}
    monkeypatch.setattr(signals, "_hearers", [told.append])
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    with interruptible(at_once=lambda: told.append("at once")) as interrupted:
        hear = signals._hearers[-1]
        for number in (signal.SIGTERM, signal.SIGINT):
            assert told == []
            hear(number)
            handlers[number](number, None)
        assert told == ["at once", signal.SIGINT]
        assert interrupted() == signal.SIGTERM


def test_a_second_signal_outside_a_command_does_what_it_did_before(monkeypatch):
    handlers, raised = dict.fromkeys(ending_signals(), "before"), []
    monkeypatch.setattr(signals, "_hearers", [])
    monkeypatch.setattr(signals, "_listen", lambda: lambda: None)
    monkeypatch.setattr(signal, "signal", lambda number, to: (handlers[number], handlers.update({number: to}))[0])
    monkeypatch.setattr(signal, "raise_signal", lambda number: raised.append((number, handlers[number])))
    with interruptible():
        for expected in ([], [(signal.SIGINT, "before")]):
            handlers[signal.SIGINT](signal.SIGINT, None)
            assert raised == expected
    assert set(handlers.values()) == {"before"}


def test_a_run_in_a_thread_leaves_the_signals_to_the_main_thread():
    found, before = [], [signal.getsignal(number) for number in ending_signals()]

    def run():
        with interruptible() as interrupted:
            found.append((interrupted(), [signal.getsignal(number) for number in ending_signals()]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(0, before)]
