"""Calibration of pair probabilities: hand-made numbers, a loop, a model that is calibrated by construction."""

import math

import numpy as np
import pytest

from jaxrl_llm.objectives.calibration import calibrate


def test_three_pairs_by_hand():
    """p = 0.9, 0.8 and 0.2: two right, (1 - p)^2 = 0.01, 0.04, 0.64; bins 0.5-0.75 and 0.75-1."""
    got = calibrate(np.log(np.asarray([9.0, 4.0, 0.25])), bins=2)
    assert got.accuracy == pytest.approx(2 / 3)
    assert got.brier == pytest.approx(0.69 / 3)
    np.testing.assert_array_equal(got.bin_pairs, [0, 3])
    np.testing.assert_allclose(got.bin_confidence, [np.nan, (0.9 + 0.8 + 0.8) / 3])
    np.testing.assert_allclose(got.bin_accuracy, [np.nan, 2 / 3])
    assert got.expected_error == pytest.approx(2.5 / 3 - 2 / 3)


def test_equals_the_loop():
    margins, bins = np.random.default_rng(0).normal(size=200) * 2, 5
    got = calibrate(margins, bins=bins)
    held = [[] for _ in range(bins)]
    for margin in margins.tolist():
        p = 1 / (1 + math.exp(-margin))
        confidence = max(p, 1 - p)
        held[min(int((confidence - 0.5) / 0.5 * bins), bins - 1)].append((confidence, margin > 0))
    assert [len(x) for x in held] == got.bin_pairs.tolist()
    error = 0.0
    for place, rows in enumerate(held):
        confidence, accuracy = (sum(x) / len(rows) for x in zip(*rows, strict=True))
        assert (got.bin_confidence[place], got.bin_accuracy[place]) == pytest.approx((confidence, accuracy))
        error += len(rows) / 200 * abs(confidence - accuracy)
    assert got.expected_error == pytest.approx(error)
    assert got.brier == pytest.approx(sum((1 - 1 / (1 + math.exp(-m))) ** 2 for m in margins.tolist()) / 200)


def test_a_calibrated_model_lies_on_the_diagonal_and_an_overconfident_one_below():
    """Labels drawn with the model's own probability; tripled margins claim more than they hold."""
    rng = np.random.default_rng(1)
    size = np.abs(rng.normal(size=40_000)) * 1.5
    margins = np.where(rng.random(40_000) < 1 / (1 + np.exp(-size)), size, -size)
    honest, loud = calibrate(margins), calibrate(3 * margins)
    assert honest.expected_error < 0.01
    np.testing.assert_allclose(honest.bin_accuracy, honest.bin_confidence, atol=0.03)
    assert loud.expected_error > 0.1
    assert (loud.bin_accuracy < loud.bin_confidence)[5:].all()
    assert loud.accuracy == honest.accuracy
    assert loud.brier > honest.brier


def test_a_coin_and_certainty():
    coin = calibrate(np.zeros(6))
    assert (coin.accuracy, coin.brier, coin.expected_error) == (0.5, 0.25, 0.0)
    sure = calibrate(np.asarray([800.0, 800.0]))
    assert (sure.accuracy, sure.brier) == (1.0, 0.0)
    assert calibrate(np.asarray([-800.0])).brier == 1.0


@pytest.mark.parametrize(
    ("margins", "bins", "message"),
    [([], 10, "margins holds 0 numbers"), ([1.0, np.nan], 10, "1 of them not finite"), ([1.0], 0, "bins=0 must be")],
)
def test_bad_input(margins, bins, message):
    with pytest.raises(ValueError, match=message):
        calibrate(np.asarray(margins), bins=bins)
