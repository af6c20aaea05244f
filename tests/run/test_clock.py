"""Where a run's time goes: shares over restarts, speed, a trace of some steps, the stacks of a step that hangs."""

import time
import types

import jax
import numpy as np
import pytest

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.peaks import peak_flops
from jaxrl_llm.plan.chips import CHIPS
from jaxrl_llm.run import clock as module
from jaxrl_llm.run.clock import Clock, speed
from jaxrl_llm.training.layout import Layout


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where the test says so; both clocks are one."""
    now = types.SimpleNamespace(at=1000.0)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(time=lambda: now.at, monotonic=lambda: now.at))
    return now


def test_shares_go_on_over_a_restart_and_what_was_lost_is_counted(clock, tmp_path):
    """By hand: 10 s of start, a step of 40 + 30 + 10 s, 10 s of saving; a stop of 50 s; 10 s of start, a step."""
    began, clock.at = clock.at, clock.at + 10
    first = Clock(tmp_path, (), None, began)
    clock.at += 80
    row = first.row({"time/rollout_s": 40.0, "time/update_s": 40.0, "time/verifier_s": 10.0})
    shares = {name.removeprefix("time/share_"): value for name, value in row.items() if "share" in name}
    of_90 = {"rollouts": 40, "updates": 30, "waiting": 10, "starts": 10, "saving": 0, "evaluations": 0, "lost": 0}
    assert shares == pytest.approx({name: seconds / 90 for name, seconds in of_90.items()})
    assert row["time/goodput"] == pytest.approx(70 / 90)
    assert (row["time/elapsed_s"], row["time/at"], row["time/to_first_update_s"]) == (90, 1090, 90)

    clock.at += 50  # of which some went into steps that the resumed run takes again
    began, clock.at = clock.at, clock.at + 10
    second = Clock(tmp_path, (), row, began)
    with second.spends("saving"):
        clock.at += 10
    clock.at += 40
    row = second.row({"time/update_s": 40.0})
    assert row["time/elapsed_s"] == 200
    assert row["time/share_lost"] == pytest.approx(50 / 200)
    assert row["time/share_starts"] == pytest.approx(20 / 200)
    assert row["time/share_saving"] == pytest.approx(10 / 200)
    assert row["time/goodput"] == pytest.approx(110 / 200)
    assert sum(value for name, value in row.items() if "share" in name) == pytest.approx(1)


def test_speed_by_hand(monkeypatch):
    """Two epochs over 6 tokens on 3 devices; 2 forwards: 3 parameters x (2 x 2 x 6 + 6 x 12) FLOPs = 288."""
    held = np.array([[[1, 1, 0], [2, 2, 2]], [[1, 0, 0], [0, 0, 0]]], np.int32)
    epochs = [[Layout(held, held, np.array(2))]] * 2
    mesh = sharding.make_mesh((3, 1, 1, 1))
    assert speed(epochs, 3, 2, 0.5, mesh) == {"time/tokens_per_s_per_device": 6 / 0.5 / 3}  # a CPU has no known peak
    monkeypatch.setattr(module, "peak_flops", lambda kind: 1000.0)
    assert speed(epochs, 3, 2, 0.5, mesh)["time/mfu"] == pytest.approx(288 / (0.5 * 3 * 1000))


def test_peaks_are_those_of_the_plan():
    kinds = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "h100": "NVIDIA H100 80GB HBM3"}
    assert {name: peak_flops(kind) for name, kind in kinds.items()} == {name: CHIPS[name].flops for name in kinds}
    assert peak_flops("cpu") is None


def test_the_traced_steps_are_those_that_are_asked_for(monkeypatch, tmp_path):
    traced, on = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: on.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", on.clear)
    for first, last, run in ((2, 3, range(1, 5)), (2, 9, range(3, 5))):  # the second resumes amid them, and ends
        watched = Clock(tmp_path, (first, last), None, time.time())
        for step in run:
            with watched.step(step):
                traced += [step] if on == [tmp_path / "profile"] else []
        watched.close()
        assert not on
    assert traced == [2, 3, 3, 4]


def test_a_step_that_hangs_shows_all_stacks_and_goes_on(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(module, "_LEAST", 0.05)
    watched = Clock(tmp_path, (), None, time.time())

    def hangs(seconds):
        time.sleep(seconds)

    for step, seconds in enumerate((0.2, 0, 0, 0.2), 1):  # the first two compile or have nothing to compare with
        with watched.step(step):
            hangs(seconds)
        assert ("in hangs" in capfd.readouterr().err) == (step == 4)
