"""Seconds of a step before it has run: FLOPs counted by hand at a known speed."""

import pytest

from jaxrl_llm.run import forecast as module
from jaxrl_llm.run.assembly import build
from jaxrl_llm.run.forecast import Forecast, forecast
from jaxrl_llm.run.settings import validate
from tests.reference import tiny_run


@pytest.fixture
def speed(monkeypatch):
    """A device that makes a million FLOPs a second for each row that it is given at once."""
    monkeypatch.setattr(module, "_speed", lambda rows, width, dtype: 1e6 * rows)


def test_flops_by_hand(tmp_path, speed):
    """Sort of three digits: prompts and answers of 4 tokens. Two layers 32 wide, 2 of 4 experts 16 wide, 13 ids."""
    changes = {"rollout.slots": 64, "updates.layout": "padded", "evaluation.samples": 2, "updates.epochs": 2}
    run = build(validate(tiny_run.make_config(tmp_path, **changes)))
    config = run.settings.model
    attention = 2 * 32 * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
    active = 2 * (attention + 2 * 3 * 32 * 16 + 32 * 4) + 13 * 32
    assert run.settings.model.active_parameters == active
    found, token = forecast(run), 2 * active / 1e6
    # 16 prompts are read at 512 rows; 16 (2 + 1) answers are sampled in 48 slots, or 16 x 8 in 64.
    assert found.evaluation == pytest.approx(token * (16 * 4 / 512 + 48 * 4 / run.evaluator.slots))
    assert found.rollout == pytest.approx(token * (16 * 4 / 512 + 128 * 4 / 64))
    # Scores are one forward over 128 rows of 8 tokens; updates cost three in each of two epochs.
    assert found.update == pytest.approx(token * (1 + 2 * 3) * 128 * 8 / 512)


def test_an_estimate_says_where_it_comes_from():
    found = Forecast(evaluation=10.0, rollout=4.0, update=8.0)
    assert found.line(1) == "estimate: step 1 about 12 s (rollout 4 s), by FLOPs and a matrix product"
    scaled = found.as_fast_as(30.0)
    assert scaled.line(1) == "estimate: step 1 about 36 s (rollout 12 s), by FLOPs and the evaluation"
    before = found.as_before({"step": 7, "time/rollout_s": 60.0, "time/update_s": 120.0})
    assert before.line(8) == "estimate: step 8 about 3 min (rollout 60 s), as step 7 took"
    assert Forecast(1.0, 0.0, 0.25).line(1).startswith("estimate: step 1 less than 1 s, by")
    assert all(len(one.line(1000)) <= 80 for one in (found, scaled, before))


def test_a_measured_speed_is_kept():
    assert module._speed(8, 64, "float32") > 1e6
    assert module._speed(8, 64, "float32") == module._speed(8, 64, "float32")
