"""Intervals cover what they say, pairing matters, verdicts are words, collapse and survival have known answers."""

import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.reporting.statistics import collapse_index, paired_difference, survival


def test_the_interval_is_students():
    # Differences 1..5: mean 3, sd sqrt(2.5), t_{0.975, 4} = 2.7764, half width 2.7764 sqrt(2.5 / 5) = 1.9632.
    d = paired_difference([11, 22, 33, 44, 55], [10, 20, 30, 40, 50])
    assert (d.n, d.mean) == (5, 3.0)
    assert d.low == pytest.approx(1.0368, abs=1e-4)
    assert d.high == pytest.approx(4.9632, abs=1e-4)
    reference = stats.ttest_1samp([1, 2, 3, 4, 5], 0).confidence_interval()
    assert (d.low, d.high) == pytest.approx((reference.low, reference.high))
    assert d.low < d.bootstrap_low < d.mean < d.bootstrap_high < d.high


def test_coverage_of_both_intervals():
    # 2000 studies of n = 5 pairs with true difference 0.3: the t interval covers 95 %, the percentile bootstrap about
    # 84 %. Three standard errors of a share of 2000 are below 0.025.
    rng = np.random.default_rng(0)
    studies = rng.normal(0.3, 1.0, (2000, 5))
    found = [paired_difference(d, np.zeros(5), resamples=500) for d in studies]
    covered = np.mean([d.low <= 0.3 <= d.high for d in found])
    bootstrap = np.mean([d.bootstrap_low <= 0.3 <= d.bootstrap_high for d in found])
    assert covered == pytest.approx(0.95, abs=0.015)
    assert bootstrap == pytest.approx(0.84, abs=0.03)


def test_verdicts_are_wrong_as_often_as_they_may_be():
    rng = np.random.default_rng(1)
    verdicts = [paired_difference(d, np.zeros(6), resamples=10).verdict for d in rng.normal(0, 1, (2000, 6))]
    assert np.mean([v in ("higher", "lower") for v in verdicts]) == pytest.approx(0.05, abs=0.015)


def test_pairing_removes_what_the_seed_does_to_both_arms():
    rng = np.random.default_rng(2)
    seeds = rng.normal(0, 1, 6)
    baseline, treatment = seeds + rng.normal(0, 0.02, 6), seeds + 0.2 + rng.normal(0, 0.02, 6)
    paired = paired_difference(treatment, baseline)
    shuffled = paired_difference(np.roll(treatment, 1), baseline)
    assert paired.verdict == "higher"
    assert shuffled.verdict == "undecided"
    assert paired.mean == pytest.approx(shuffled.mean)  # the estimate is the same, the certainty is not


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([], "no pair is complete"),
        ([1.0], "estimate only: 1 of 5 pairs"),
        ([1.0, 1.1, 1.2, 1.1], "estimate only: 4 of 5 pairs"),
        ([1.0, 1.1, 1.2, 1.1, 1.0], "higher"),
        ([-1.0, -1.1, -1.2, -1.1, -1.0], "lower"),
        ([-1.0, 1.1, -1.2, 1.1, 0.1], "undecided"),
        ([0.0] * 5, "undecided"),
        ([1.0, 1.1, 1.2, 1.1, float("nan")], "estimate only: 4 of 5 pairs"),  # an incomplete pair is no pair
    ],
)
def test_verdicts(differences, verdict):
    assert paired_difference(differences, np.zeros(len(differences))).verdict == verdict


def test_few_pairs_have_no_interval():
    assert np.isnan(paired_difference([1.0], [0.0]).low)
    assert paired_difference([1.0], [0.0]).mean == 1.0
    assert np.isnan(paired_difference([], []).mean)


def test_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match=r"treatment has shape \(2,\), baseline \(1,\)"):
        paired_difference([1, 2], [1])


@pytest.mark.parametrize(
    ("reward", "index"),
    [
        ([0.1, 0.2, 0.3, 0.4], None),
        ([0.8] * 3 + [0.39] * 5, 7),  # the fifth rollout in a row below 0.4
        ([0.8] * 3 + [0.39] * 4 + [0.41] + [0.39] * 4, None),  # never five in a row
        ([0.8] * 3 + [0.4] * 9, None),  # half is not below half
        ([0.2, 0.8] + [0.3] * 5, 6),  # the maximum runs
        ([0.3] * 9 + [0.8], None),  # a later maximum does not judge earlier rollouts
        ([0.0] * 9, None),  # what never rose cannot fall
        ([0.5, 0.6, float("nan"), 0.6], 2),
        ([float("inf")], 0),
        ([], None),
    ],
)
def test_collapse(reward, index):
    assert collapse_index(reward) == index


def test_survival_of_kaplan_and_meier():
    # Five runs: collapse at 2 (5 at risk), one leaves at 3, collapse at 4 (3 at risk), two last to 6.
    times, alive = survival([2, 3, 4, 6, 6], [True, False, True, False, False])
    np.testing.assert_allclose(times, [0, 2, 4])
    np.testing.assert_allclose(alive, [1, 4 / 5, 4 / 5 * 2 / 3])


def test_survival_without_censoring_is_the_share_alive():
    times, alive = survival([1, 2, 2, 5], [True] * 4)
    np.testing.assert_allclose(times, [0, 1, 2, 5])
    np.testing.assert_allclose(alive, [1, 0.75, 0.25, 0])
    times, alive = survival([7, 7], [False, False])
    assert (times.tolist(), alive.tolist()) == ([0.0], [1.0])
