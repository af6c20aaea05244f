"""Real runs and commands that signals end while they are inside XLA: at once, with what was saved before left whole."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from jaxrl_llm.records.checkpointing import steps_of
from tests.reference.page_commands import ROOT

pytestmark = pytest.mark.slow
SOON = 10.0  # seconds, on a busy machine; each phase of the run takes longer than that
TELLS = """
import sys, threading, time
from jaxrl_llm.ground import phases
from jaxrl_llm.records import progress
def tell(shown=None):
    while True:
        names = [one.name for one in phases.under_way()]
        names += [f"compiling {one.compiling}" for one in list(progress._OPEN) if one.compiling]
        if (names := "/".join(names)) != shown:
            shown = names
            print(f"phase {names}", flush=True)
        time.sleep(0.002)
threading.Thread(target=tell, daemon=True).start()
"""


@contextlib.contextmanager
def started(module, *arguments):
    """A command that prints what it is doing; its process group is its own, as that of a terminal."""
    code = f"{TELLS}\nfrom jaxrl_llm.{module} import main\nsys.exit(main())"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # so that compiling lasts
    with psutil.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def until_printed(process, pattern):
    """Reads the output up to a line that the pattern matches; the lines so far."""
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if re.fullmatch(pattern, lines[-1]):
            return lines
    raise AssertionError((lines[-20:], process.stderr.read()))


def ended_at_once(process, number):
    """Ends the process by a signal to its group; returns what it has written to standard error."""
    began, family = time.monotonic(), process.children(recursive=True)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - began < SOON
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert psutil.wait_procs(family, SOON)[1] == []
    assert "Traceback" not in said
    return said


def arguments(folder, workdir, **changes):
    """A tiny model with many prompts, so that every phase lasts."""
    fields = {
        "task.data_dir": folder / "data",
        "task.options.digits": 10,
        "warm_start.steps": 0,
        "rollout.prompts": 512,
        "rollout.group_size": 16,
        "evaluation.prompts": 64,
        "evaluation.samples": 64,
        "evaluation.every": 3,
        "checkpoint.every": 1,
        "steps": 4,
    }
    set_to = [f"--config.{name}={value}" for name, value in (fields | changes).items()]
    return ["--config=grpo:smoke", f"--workdir={workdir}", *set_to]


@pytest.mark.parametrize(
    ("phases", "step"),
    [
        (["step 3/rollout"], 3),
        pytest.param(["step 3/updates"], 3, marks=pytest.mark.long),
        pytest.param(["step 3/updates", "evaluating"], 3, marks=pytest.mark.long),
        pytest.param(["step 3/updates", "saving"], 3, marks=pytest.mark.long),
    ],
)
def test_two_signals_end_a_run_in_any_phase_and_what_was_saved_resumes(folder, tmp_path, phases, step):
    line = arguments(folder, tmp_path / "run")
    with started("main", *line) as process:
        for phase in phases:
            until_printed(process, f"phase {phase}")
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr.readline() == f"finishing step {step} and saving; again ends now\n"
        said = ended_at_once(process, signal.SIGTERM)
    assert re.match("stopped by SIGTERM(; to go on from the newest checkpoint: python -m jaxrl_llm.main .*)?\n$", said)
    saved = max(steps_of(tmp_path / "run"), default=0)
    assert max(0, step - 2) <= saved <= step  # the one before may not be written yet
    with started("main", *line) as process:
        seen = until_printed(process, f"phase step {saved + 1}")
        assert (f"resumed from step {saved}" in seen) == (saved > 0)
        assert ended_at_once(process, signal.SIGKILL) == ""


@pytest.mark.parametrize("phase", ["compiling rollout", "evaluating"])
def test_one_signal_ends_a_command_in_any_phase(folder, tmp_path, phase):
    """Before the first step, and in commands that have nothing to save."""
    line = arguments(folder, tmp_path / "run")
    for module, given in (("main", line), ("check.__main__", [line[0], *line[2:]])):
        where = phase if module == "main" else phase.replace("evaluating", "rollout")
        with started(module, *given) as process:
            until_printed(process, f"phase (.*/)?{where}")
            assert ended_at_once(process, signal.SIGINT).splitlines()[-1] == "stopped by Ctrl-C"
