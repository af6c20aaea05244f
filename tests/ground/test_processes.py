"""Two real processes: who verifies what, what all know in the end, and how one that fails ends the other."""

import argparse

import pytest

from jaxrl_llm.config import start_up
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
from jaxrl_llm.rollout.trajectory import Trajectory
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
verified = verify(Trajectory(*there), dataclasses.replace(task, verify=rule), prompts, 4)
assert asked == [answers[i] for i in processes.share(8)]
assert verified.texts == answers
np.testing.assert_array_equal(verified.rewards, [text == "12" for text in answers])
print("all agree", flush=True)
processes.wait_for_all("the end")
if index:
    sys.exit(start_up.leave(2))
jax.jit(lambda x: x.sum())(there[0]).block_until_ready()
processes.wait_for_all("in vain")
"""


@pytest.mark.slow
def test_two_processes_share_the_work_and_neither_waits_for_one_that_failed(tmp_path):
    job = several.start(tmp_path, 2, ["-c", _MEMBER])
    try:
        assert job.codes(60, of=[1]) == [2], job.printed(1)
        (code,) = job.codes(15, of=[0])
    finally:
        job.end()
    assert "all agree" in job.printed(0), job.printed(0)
    if code == 1:
        assert "error: process 0 of 2 failed" in job.printed(0)
    else:
        assert (code, "JAX distributed service detected fatal errors" in job.printed(0)) == (-6, True), job.printed(0)


def test_one_process_agrees_with_itself():
    assert list(processes.share(3)) == [0, 1, 2]
    assert processes.gather([1, "a"]) == [1, "a"]
    assert (processes.largest(4), processes.everywhere(True)) == (4, True)
    processes.wait_for_all("nobody else")
    assert start_up.leave(2) == 2


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


def _given(coordinator=None, processes=None, process=None):
    return argparse.Namespace(coordinator=coordinator, processes=processes, process=process)
