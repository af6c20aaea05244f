"""Two real processes: who verifies what, what all know in the end, and how one that fails ends the other."""

import argparse
import json
import re
import socket
import sys
import threading

import pytest

from jaxrl_llm.config import joining, start_up
from jaxrl_llm.ground import processes
from tests.reference import several

_MEMBER = """
import argparse
import dataclasses
import os
import sys
import jax
import numpy as np
from jaxrl_llm import tasks
from jaxrl_llm.config import start_up
from jaxrl_llm.ground import processes, sharding
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.rollout.verification import verify

parser = argparse.ArgumentParser()
for name, kind in (("coordinator", str), ("processes", int), ("process", int)):
    parser.add_argument(f"--{name}", type=kind)
given = parser.parse_args()
start_up.join(given, start_timeout_s=60, heartbeat_timeout_s=10)
index = jax.process_index()
assert jax.process_count() == 2 and jax.device_count() == 4
assert start_up.is_first() == (index == 0)
assert list(processes.share(7)) == [[0, 1, 2], [3, 4, 5, 6]][index]
assert processes.gather(["é" * n for n in processes.share(7)]) == ["é" * n for n in range(7)]
assert processes.largest(index) == 1
assert processes.everywhere(True) and not processes.everywhere(index == 0)

mesh = sharding.make_mesh((1, -1, 1, 1))
answers = ["12", "21", "12", "1", "9", "21", "12", "12"]
task = tasks.make("sort", digits=2)
ids = [task.tokenizer.encode(text) for text in answers]
tokens = np.array([row + [0] * (2 - len(row)) for row in ids], np.int32)
held = np.array([[True] * len(row) + [False] * (2 - len(row)) for row in ids])
logprobs, truncated = np.zeros((8, 2), np.float32), np.zeros(8, bool)
there = sharding.put_rows((tokens, held.astype(np.int32), held, logprobs, truncated), mesh)
assert not there[0].is_fully_addressable
np.testing.assert_array_equal(processes.fetch(there)[0], tokens)
asked = []


def rule(prompt, answer, gold, row):
    asked.append(answer)
    return float(answer == gold)


prompts = {"prompt": ["21=", "12="], "answer": ["12", "12"], "row": [{}, {}]}
texts, rewards, _ = verify(Rollout(*there), dataclasses.replace(task, verify=rule), prompts, 4)
assert asked == [answers[i] for i in processes.share(8)]
assert texts == answers
np.testing.assert_array_equal(rewards["verifier"], [text == "12" for text in answers])
print("all agree", flush=True)
processes.wait_for_all("the end")
if index:
    sys.exit(processes.leave(2))
jax.jit(lambda x: x.sum())(there[0]).block_until_ready()
processes.wait_for_all("in vain")
"""


@pytest.mark.slow
def test_two_processes_share_the_work_and_neither_waits_for_one_that_failed(tmp_path):
    with several.start(tmp_path, 2, ["-c", _MEMBER]) as job:
        assert job.codes(60, of=[1]) == [2], job.printed(1)
        (code,) = job.codes(15, of=[0])
    assert "all agree" in job.printed(0), job.printed(0)
    if code == 1:
        assert "error: process 0 of 2 failed" in job.printed(0)
    else:
        assert (code, "JAX distributed service detected fatal errors" in job.printed(0)) == (-6, True), job.printed(0)


_SIGNALLED = """
import os
import signal
from jaxrl_llm.config import start_up
from jaxrl_llm.config.command_line import Parser, add_processes
from jaxrl_llm.ground import processes

parser, heard = Parser(), []
add_processes(parser)
given = parser.parse_args()
signal.signal(signal.SIGTERM, lambda *got: heard.append(got[0]))
start_up.join(given, start_timeout_s=60, heartbeat_timeout_s=10)
os.kill(os.getpid(), signal.SIGTERM)
assert heard == ([] if given.process else [signal.SIGTERM])
step = 1
while not (stop := processes.agreed_stop(0, step)):
    step += 1
print("stop", int(stop), "after", step)
"""


@pytest.mark.slow
def test_notice_of_jax_in_one_process_stops_both_after_the_same_step(tmp_path):
    """The service hears of SIGTERM in process 1 alone: process 0 keeps its handler."""
    job = several.ended(tmp_path, 2, ["-c", _SIGNALLED], ["-c", several.SIGTERM_IS_JAXS + _SIGNALLED], timeout=100)
    said = [[line for line in job.printed(i).splitlines() if line.startswith("stop")] for i in range(2)]
    assert said[0] == said[1]
    assert re.fullmatch(r"stop 15 after \d+", *said[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"a": "1", "b": "2"}] * 3, ""),
        (
            [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1", "b": "2"}],
            "the processes do not run the same: b is 2 in processes 0, 2, 3 in process 1; start all of them alike",
        ),
        ([{}, {"b": "2"}], "b is absent in process 0, 2 in process 1"),
        ([{"a": "1", "b": "1"}, {"a": "2", "b": "2"}], "a is 1 in process 0, 2 in process 1"),
        (
            [{"a": str(place > 9)} for place in range(11)],
            "in processes 0, 1, 2, 3, 4, 5, 6, 7, ..., True in process 10;",
        ),
    ],
)
def test_the_first_difference_is_named(monkeypatch, given, message):
    """In every process, each of which leaves JAX's service before it raises."""
    assert message in processes.first_difference(given)
    for place, own in enumerate(given):
        store = {f"jaxrl_llm/same/{i}": json.dumps(one) for i, one in enumerate(given) if i != place}
        client = argparse.Namespace(key_value_set=store.__setitem__, blocking_key_value_get=lambda k, ms, s=store: s[k])
        state = argparse.Namespace(client=client, process_id=place, num_processes=len(given))
        left = []
        monkeypatch.setattr(processes.distributed, "global_state", state)
        monkeypatch.setattr(processes.jax.distributed, "shutdown", lambda left=left: left.append(True))
        if not message:
            processes.require_same(own, 1)
            continue
        with pytest.raises(ValueError, match=re.escape(message)):
            processes.require_same(own, 1)
        assert left


def test_a_folder_that_others_do_not_see(monkeypatch, tmp_path):
    """The mark of the first process, which it takes away again."""
    assert processes.share_folder(tmp_path)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "gather", lambda own: [1, 2])
    monkeypatch.setattr(
        processes, "wait_for_all", lambda place: seen.append([path.name for path in tmp_path.iterdir()])
    )
    monkeypatch.setattr(processes, "everywhere", bool)
    seen = []
    assert processes.share_folder(tmp_path)
    assert seen == [[".seen-1"]]
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(processes.jax, "process_index", lambda: 1)
    assert not processes.share_folder(tmp_path)


def test_one_process_agrees_with_itself():
    assert list(processes.share(3)) == [0, 1, 2]
    assert processes.gather([1, "a"]) == [1, "a"]
    assert (processes.largest(4), processes.everywhere(True)) == (4, True)
    processes.wait_for_all("nobody else")
    assert processes.leave(2) == 2


@pytest.mark.parametrize(
    ("environment", "flags", "message"),
    [
        ({}, {"coordinator": "a:1"}, "processes=None, process=None leave out"),
        ({"JAX_NUM_PROCESSES": "2"}, {}, "coordinator=None, processes=2, process=None leave out"),
        ({"JAX_PROCESS_ID": "first"}, {}, "JAX_PROCESS_ID=first must be a whole number"),
    ],
)
def test_a_place_that_is_not_whole_is_refused(monkeypatch, environment, flags, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        start_up.join(_given(**flags), 1, 1)


@pytest.mark.parametrize("environment", [{}, {"SLURM_STEP_NODELIST": "a", "SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "4"}])
def test_a_process_by_itself_joins_nobody(monkeypatch, environment):
    """Also the only task of a SLURM step, and a shell of an allocation whose tasks are not started by srun."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start_up.jax.distributed, "initialize", None)  # would fail
    start_up.join(_given(), 1, 1)


def test_a_launcher_that_names_no_coordinator_is_reported(monkeypatch):
    def initialize(*place, **timeouts):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(start_up.jax.distributed, "initialize", initialize)
    with pytest.raises(ValueError, match=r"cannot join \(coordinator_address .*see docs/several_processes.md"):
        start_up.join(_given(), 1, 1)


@pytest.mark.parametrize(
    ("place", "answers", "message"),
    [
        (None, False, "the launcher has not yet said where they are"),
        (0, False, "this is process 0 of 3; one that prints no such line has not started, or cannot reach localhost:"),
        (2, True, "this is process 2 of 3, and process 0 answers at localhost:"),
        (2, False, "this is process 2 of 3, and nothing answers at localhost:"),
    ],
)
def test_a_wait_is_said_and_ends(monkeypatch, capsys, place, answers, message):
    """Every 15 seconds up to the limit; then the process ends with one line and exit code 1."""
    codes, clock, ended = [], [0.0], threading.Event()

    class Quick(threading.Event):
        def wait(self, timeout=None):
            clock[0] += timeout
            return ended.is_set() or super().wait(0.001)

    def leave(code):
        codes.append(code)
        ended.set()

    monkeypatch.setattr(joining.os, "_exit", leave)
    monkeypatch.setattr(joining, "threading", argparse.Namespace(Event=Quick, Thread=threading.Thread))
    monkeypatch.setattr(joining, "time", argparse.Namespace(monotonic=lambda: clock[0]))
    updated = {}
    with socket.socket() as coordinator:
        coordinator.bind(("localhost", 0))
        if answers:
            coordinator.listen()
        address = None if place is None else f"localhost:{coordinator.getsockname()[1]}"
        client = None if place is None else object()
        state = argparse.Namespace(client=client, coordinator_address=address, process_id=place, num_processes=3)
        monkeypatch.setattr(joining.distributed, "global_state", state)
        monkeypatch.setattr(start_up.jax.config, "update", updated.__setitem__)
        monkeypatch.setattr(start_up.jax.distributed, "is_initialized", lambda: False)  # it reads the state above
        monkeypatch.setattr(start_up.jax.distributed, "initialize", lambda *_, **__: ended.wait(20))
        monkeypatch.setattr(joining.sys, "excepthook", sys.excepthook)
        start_up.join(_given("a:1", 3, 0), 60, 1)
    *lines, last = capsys.readouterr().err.splitlines()
    assert codes == [1]  # not 2, on which a scheduler would not start it again
    assert updated == {"jax_enable_preemption_service": True}
    assert [line.rpartition(" (")[2] for line in lines] == [
        f"{n} s of processes.start_timeout_s=60)" for n in (15, 30, 45)
    ]
    assert all(line.startswith("waiting for other processes: " + message) for line in lines)
    assert last.startswith("error: not all processes have joined: " + message)
    assert last.endswith("(60 s of processes.start_timeout_s=60); see docs/several_processes.md")


def _given(coordinator=None, processes=None, process=None):
    return argparse.Namespace(coordinator=coordinator, processes=processes, process=process)
