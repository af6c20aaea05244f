"""What a command ends in: the line, the exit code, the traceback's file; and how soon it answers and hears a signal."""

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax
import pytest

from jaxrl_llm.__main__ import COMMANDS
from jaxrl_llm.config import loading
from jaxrl_llm.config.command_line import Parser
from jaxrl_llm.config.guard import guarded
from jaxrl_llm.ground import processes
from jaxrl_llm.ground.signals import Stopped

ROOT = Path(__file__).parents[2]
MODULES = [module for module, _ in COMMANDS.values()]
SIGNALS = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM", "SIGHUP": "SIGHUP"}


def raising(error, started=False, workdir=None):
    def work(arguments, guard):
        guard.started, guard.workdir = started, workdir
        raise error

    return work


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("kind", [ValueError, OSError, ModuleNotFoundError, FloatingPointError, UnicodeError])
def test_an_error_of_the_user_is_one_line(capsys, kind, started):
    assert guarded(raising(kind("what\n to do"), started), []) == (1 if started else 2)
    assert capsys.readouterr() == ("", "error: what to do\n")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")])
def test_too_little_memory_names_what_takes_less(capsys, error):
    assert guarded(raising(error), []) == 1
    assert re.fullmatch(r"error: out of memory.*; lower updates\.micro_batch_rows or .*\n", capsys.readouterr().err)


def test_what_breaks_among_several_processes_is_said_by_their_hook(monkeypatch):
    said = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(processes, "leave", lambda code, alone: 10 * code + alone)
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: said.append(str(error)))
    assert guarded(raising(jax.errors.JaxRuntimeError("UNAVAILABLE"), True), []) == 11
    assert said == ["UNAVAILABLE"]


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_that_has_saved_leaves_with_the_others(monkeypatch, saved):
    monkeypatch.setattr(processes, "leave", lambda code, alone: 10 * code + alone)
    assert guarded(raising(Stopped("stopped", signal.SIGTERM, saved), True), []) == 1430 + (not saved)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("kind", [KeyError, TypeError, AssertionError, RecursionError, RuntimeError])
def test_a_fault_of_the_package_leaves_its_traceback_in_a_file(capsys, tmp_path, monkeypatch, kind, started):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    workdir = tmp_path / "run"
    workdir.mkdir()
    assert guarded(raising(kind("odd"), started, workdir), []) == 70
    (error,) = capsys.readouterr().err.splitlines()
    (file,) = (workdir if started else tmp_path).glob("traceback-*.txt")
    assert f"traceback in {file}; " in error
    assert "error: a fault of jaxrl_llm (" in error
    assert "Traceback (most recent call last)" in file.read_text()
    assert f"jaxrl_llm {metadata.version('jaxrl_llm')}, jax " in file.read_text()


def test_a_fault_of_the_users_own_file_names_its_line(capsys, tmp_path):
    path = tmp_path / "own.py"
    path.write_text("def draw(row):\n    return row['nothing']\n")
    draw = loading.load_module(path).draw
    assert guarded(lambda arguments, guard: draw({}), []) == 2
    assert capsys.readouterr().err == f"error: {path}, line 2: KeyError: 'nothing'; correct the file\n"


@pytest.mark.parametrize("module", [*MODULES, "jaxrl_llm.sweep.branching"])
def test_the_guard_is_around_every_command(capsys, tmp_path, monkeypatch, module):
    def fails(*args):
        raise LookupError("planted")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Parser, "parse_args", fails)
    assert importlib.import_module(module).main([]) == 70
    assert capsys.readouterr().err.count("\n") == 1


AT_ONCE = """
import contextlib, importlib, io, sys
lines = (
    "main --help", "main --version", "main --bad", "main --config=grpo", "main --config=nothing --workdir=x",
    "main --config=grpo --workdir=x --config.optimizer.lr=1", "evaluation --help", "evaluation --workdir=x --k=all",
    "check.__main__ --help", "check.__main__ --config=nothing",
    "evaluation --checkpoint=x --config=nothing", "generate --help", "generate --workdir=x --system=y", "export --help",
    "export", "sweep.__main__ --help", "sweep.__main__ --sweep=nothing.py --workdir=x", "plan.__main__ --help",
    "plan.__main__ --config=nothing --topology=v5e:2x2", "report.__main__ --help", "report.__main__", "__main__ --help",
    "__main__ --version", "__main__ trian",
)
for line in lines:
    name, *arguments = line.split()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = importlib.import_module(f"jaxrl_llm.{name}").main(arguments)
        except SystemExit as stop:
            code = stop.code
    assert code == (0 if arguments and arguments[-1] in ("--help", "--version") else 2), line
    late = {"jax", "orbax", "matplotlib", "tensorboardX"} & sys.modules.keys()
    assert not late, f"{line} imports {late}"
"""


def test_help_versions_and_refusals_do_without_jax(tmp_path):
    done = subprocess.run([sys.executable, "-c", AT_ONCE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def child(body, before=""):
    """A process that runs this body as the work of a command, killed in the end; its output is buffered."""
    code = "import signal, sys, time\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup` changes\n"
    code += f"from jaxrl_llm.config.guard import guarded\ndef work(arguments, guard):\n{body}"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", f"{code}\n{before}\nsys.exit(guarded(work, None))"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, cwd=ROOT, text=True, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("then", ["for i in range(10**6): print(i)", "print(1)\n    return 0"])
def test_a_reader_that_is_gone_ends_a_command_without_a_word(then):
    """Also where the last lines are written at the end of the process."""
    with child(f"    print(0, flush=True); sys.stdin.read()\n    {then}") as process:
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        process.stdin.close()
        assert (process.wait(60), process.stderr.read()) == (141, "")


SWALLOWS = """
    guard.onward = lambda: "; more"
    print("ready", flush=True)
    while True:
        try: time.sleep(0.01)
        except BaseException: pass
"""


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_ends_a_command_at_once_and_nothing_swallows_it(name):
    number = getattr(signal, name)
    with child(SWALLOWS) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.communicate(timeout=20) == ("", f"stopped by {SIGNALS[name]}; more\n")
        assert process.returncode == 128 + number


def test_nohup_is_respected():
    ignored = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with child("    print('ready', flush=True); time.sleep(0.2); return 0", ignored) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        assert (process.wait(60), process.stderr.read()) == (0, "")
