"""The coefficient of the KL inside the reward: hand-made steps, a simulation that reaches its target, bad input."""

import math

import numpy as np
import pytest

from jaxrl_llm.objectives.rewards import KlController


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.2),  # on target
        (6.6, 0.2 * 1.01),  # 10 % above: 1 + 0.1 * 0.1
        (5.4, 0.2 * 0.99),
        (60.0, 0.2 * 1.02),  # the error is cut at 20 %
        (-60.0, 0.2 * 0.98),  # an estimate may be negative
    ],
)
def test_one_step_by_hand(kl, expected):
    assert KlController(0.2, target=6.0).next(0.2, kl) == pytest.approx(expected)


def test_without_a_target_it_is_fixed():
    assert KlController(0.05).next(0.05, 1e9) == 0.05


@pytest.mark.parametrize("initial", [0.001, 0.2, 5.0])
@pytest.mark.parametrize("target", [0.5, 6.0])
def test_it_reaches_its_target(initial, target):
    """A policy that is optimal for reward r - beta KL: a Gaussian shifted by slope / beta has KL (slope / beta)^2 / 2.

    It follows the optimum by a tenth a step, and the KL is measured on 256 noisy answers.
    """
    controller, slope = KlController(initial, target=target), 0.5
    rng, coefficient, shift, measured = np.random.default_rng(0), initial, 0.0, []
    for _ in range(1200):
        shift += 0.1 * (slope / coefficient - shift)
        kl = float(np.mean(shift * (rng.normal(size=256) + shift) - shift**2 / 2))  # k1, answers of the policy
        measured.append(kl)
        coefficient = controller.next(coefficient, kl)
    assert np.mean(measured[-200:]) == pytest.approx(target, rel=0.05)
    assert coefficient == pytest.approx(slope / math.sqrt(2 * target), rel=0.1)
    assert abs(np.mean(measured[:5]) - target) > 0.2 * target  # it was not there from the start


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"initial": -0.1}, "reward_kl_coef=-0.1 is out of range"),
        ({"initial": 0.1, "target": 0.0}, "kl_target=0.0 is out of range"),
        ({"initial": 0.1, "gain": 0.0}, "kl_gain=0.0 is out of range"),
        ({"initial": 0.0, "target": 1.0}, "kl_target=1.0 with reward_kl_coef=0.* start from a positive"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        KlController(**fields)


def test_a_kl_that_is_not_finite_stops_the_run():
    with pytest.raises(FloatingPointError, match="kl=nan cannot steer reward_kl_coef"):
        KlController(0.1, target=1.0).next(0.1, math.nan)
