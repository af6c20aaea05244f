"""What is said between two lines of a run: answers counted by the clock, compilation, and nothing where it is short."""

import contextlib
import threading

import pytest

from jaxrl_llm.ground import phases
from jaxrl_llm.ground.phases import phase
from jaxrl_llm.records import progress as module
from jaxrl_llm.records.progress import Progress, told
from tests.reference.waiting import until

BEGINS = "/jax/core/compile/jaxpr_to_mlir_module_duration"
ENDS = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def now(monkeypatch):
    """time.monotonic, moved by hand."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def progress():
    progress = Progress()
    yield progress
    progress.close()


def test_answers_are_counted_by_the_clock_from_when_their_program_runs(now, progress):
    progress.expected["rollout"] = 200.0
    assert progress.text() == ""
    with phase("step 3"), phase("rollout", 256):
        progress.heard(BEGINS, 0.5, "_generate")
        now[0] = 70.0
        assert progress.text() == "step 3: compiling rollout ... 01:10"
        progress.heard(ENDS, 70.0, "_generate")
        now[0] = 170.0  # half of the expected time after 70
        assert progress.text() == "step 3: rollout about 128/256 ... 01:40<01:40"
        assert progress.text(least=101.0) == ""
        now[0] = 271.0
        assert progress.text() == "step 3: rollout, 256 answers ... 03:21"
    with phase("step 4"):
        assert progress.text() == "step 4 ... 00:00"
        with phase("rollout", 256):  # as long as the last one: 201 seconds
            now[0] += 67.0
            assert progress.text() == "step 4: rollout about 85/256 ... 01:07<02:14"
    assert progress.compiled == 70.0


def test_what_breaks_off_is_no_measure(now, progress):
    progress.expected["evaluating"] = 10.0
    now[0] = 3.0
    with contextlib.suppress(KeyboardInterrupt), phase("evaluating", 4):
        raise KeyboardInterrupt
    assert progress.expected == {"evaluating": 10.0}
    assert phases.under_way() == ()


def test_a_silence_is_broken_every_minute_and_nothing_else_is(monkeypatch):
    monkeypatch.setattr(module, "SILENCE", 0.3)
    monkeypatch.setattr(module, "TICK", 0.01)
    said = []
    with told(said.append) as progress:
        with phase("evaluating", 640):
            progress.expected["evaluating"] = 1000.0
            until(lambda: len(said) == 2)
        with phase("rollout", 8):
            threading.Event().wait(0.05)
    assert said == ["evaluating about 0/640 ... 00:00<16:39"] * 2
