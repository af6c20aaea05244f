"""Two processes that ask one server: each for its own rows, the first with the weights; and both end alike."""

import re

import numpy as np
import pytest

from jaxrl_llm.training.in_flight import as_arrays
from tests.reference import several
from tests.reference.fake_vllm import fake_vllm
from tests.reference.vllm_answers import engine, generate

pytestmark = pytest.mark.slow


def test_two_processes_have_the_trajectory_of_one(tmp_path):
    """Six answers are asked for once, three by each, and the handshake's eight once."""
    with fake_vllm() as one:
        alone = as_arrays(generate(engine(one.address))[0])
    with fake_vllm() as server:
        several.ended(tmp_path / "job", 2, ["-m", "tests.reference.asking_process", server.address, f"{tmp_path}/out"])
        assert (server.served, server.shaken) == (6, 8)
    for process in range(2):
        found = np.load(tmp_path / f"out.{process}.npz")
        assert 0 < found["handshake"] < 1e-5
        assert set(found) == {*alone, "handshake"}
        for name, array in alone.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_what_ends_one_process_ends_both(tmp_path):
    """A server that is gone for one, and a handshake that only the first process has."""
    for name, how, message in (
        ("gone", {"faults": [500] * 99}, r"process [01]: .*http://.* says 500"),
        ("wrong", {"off": 9.0}, "does not serve these weights"),
    ):
        with fake_vllm(**how) as server:
            arguments = ["-m", "tests.reference.asking_process", server.address, f"{tmp_path}/{name}"]
            several.ended(tmp_path / f"job-{name}", 2, arguments, timeout=120)
        (said,) = {(tmp_path / f"{name}.{process}.txt").read_text() for process in range(2)}
        assert re.search(message, said)
