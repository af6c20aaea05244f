"""Intervals cover what they say, pairing matters, verdicts are words, collapse and survival have known answers."""

import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.report.read import collapse_index
from jaxrl_llm.report.statistics import (
    batches_differ,
    detectable,
    half_width,
    holm,
    paired_difference,
    survival,
    verdict,
)


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
    # 600 studies of n = 5 pairs with true difference 0.3: the t interval covers 95 %, the percentile bootstrap about
    # 84 %. Three standard errors of these shares of 600 are 0.027 and 0.045.
    rng = np.random.default_rng(0)
    studies = rng.normal(0.3, 1.0, (600, 5))
    found = [paired_difference(d, np.zeros(5), resamples=500) for d in studies]
    covered = np.mean([d.low <= 0.3 <= d.high for d in found])
    bootstrap = np.mean([d.bootstrap_low <= 0.3 <= d.bootstrap_high for d in found])
    assert covered == pytest.approx(0.95, abs=0.027)
    assert bootstrap == pytest.approx(0.84, abs=0.045)


def test_verdicts_are_wrong_as_often_as_they_may_be():
    rng = np.random.default_rng(1)
    p = [paired_difference(d, np.zeros(6), resamples=10).p for d in rng.normal(0, 1, (800, 6))]
    assert np.mean(np.less(p, 0.05)) == pytest.approx(0.05, abs=0.023)
    # Four arms without any effect: some uncorrected p below 0.05 in 18.5 % of studies, Holm's in at most 5 %.
    arms = np.reshape(p, (200, 4))
    assert np.mean(np.min(arms, 1) < 0.05) == pytest.approx(1 - 0.95**4, abs=0.08)
    assert np.mean([np.min(holm(study)) < 0.05 for study in arms]) < 0.1


def test_pairing_removes_what_the_seed_does_to_both_arms():
    rng = np.random.default_rng(2)
    seeds = rng.normal(0, 1, 6)
    baseline, treatment = seeds + rng.normal(0, 0.02, 6), seeds + 0.2 + rng.normal(0, 0.02, 6)
    paired = paired_difference(treatment, baseline)
    shuffled = paired_difference(np.roll(treatment, 1), baseline)
    assert verdict(paired, paired.p) == "higher"
    assert verdict(shuffled, shuffled.p) == "undecided"
    assert paired.mean == pytest.approx(shuffled.mean)  # the estimate is the same, the certainty is not


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        ([1.0], "estimate only: 1 of 5 seeds"),
        ([1.0, 1.1, 1.2, 1.1], "estimate only: 4 of 5 seeds"),
        ([1.0, 1.1, 1.2, 1.1, 1.0], "higher"),
        ([-1.0, -1.1, -1.2, -1.1, -1.0], "lower"),
        ([-1.0, 1.1, -1.2, 1.1, 0.1], "undecided"),
        ([0.0] * 5, "identical"),
        ([0.0] * 2, "identical"),
        ([0.25] * 5, "higher"),  # no spread at all
        ([1.0, 1.1, 1.2, 1.1, float("nan")], "estimate only: 4 of 5 seeds"),  # an incomplete pair is no pair
    ],
)
def test_verdicts(differences, words):
    d = paired_difference(differences, np.zeros(len(differences)))
    assert verdict(d, d.p) == words


def test_a_corrected_p_above_the_level_is_undecided():
    d = paired_difference([0.1, 0.3, 0.2, 0.4, 0.0], np.zeros(5))
    assert verdict(d, d.p) == "higher"
    assert verdict(d, 0.06) == "undecided"


def test_pairs_of_one_seed_are_one_observation():
    # Three seeds of two branches: seed means 1, 2 and 3, whatever the spread inside a seed.
    d = paired_difference([0, 2, 1, 3, 2, 4], np.zeros(6), ["a", "a", "b", "b", "c", "c"])
    whole = paired_difference([1, 2, 3], np.zeros(3))
    assert (d.n, d.pairs) == (3, 6)
    assert (d.mean, d.low, d.high, d.p) == (whole.mean, whole.low, whole.high, whole.p)
    # Branches that repeat their trajectory tell nothing new: treating them as independent would halve the interval.
    repeated = paired_difference(np.repeat([1.0, 2, 3], 4), np.zeros(12), np.repeat([0, 1, 2], 4).tolist())
    assert (repeated.low, repeated.high) == (whole.low, whole.high)
    naive = paired_difference(np.repeat([1.0, 2, 3], 4), np.zeros(12))
    assert naive.high - naive.low < 0.5 * (whole.high - whole.low)


def test_clustered_intervals_cover_what_they_say():
    rng = np.random.default_rng(3)
    effects = 0.3 + rng.normal(0, 1, (400, 6, 1)) + rng.normal(0, 0.5, (400, 6, 4))
    labels = np.repeat(range(6), 4).tolist()
    found = [paired_difference(d.ravel(), np.zeros(24), labels, resamples=10) for d in effects]
    assert np.mean([d.low <= 0.3 <= d.high for d in found]) == pytest.approx(0.95, abs=0.033)


def test_detectable_is_the_effect_with_the_stated_power():
    # Tables of the paired t test: 34 pairs find d = 0.5 with a power of 0.808, 10 pairs d = 1 with 0.803.
    assert detectable(34, power=0.8078) == pytest.approx(0.5 * np.sqrt(34), rel=1e-3)
    assert detectable(10, power=0.8031) == pytest.approx(1.0 * np.sqrt(10), rel=1e-3)
    rng = np.random.default_rng(4)
    for n in (2, 5, 12):
        studies = rng.normal(detectable(n) / np.sqrt(n), 1, (4000, n))
        result = stats.ttest_1samp(studies, 0, axis=1)
        share = np.mean((result.pvalue < 0.05) & (result.statistic > 0))
        assert share == pytest.approx(0.8, abs=0.025)
    d = paired_difference([1.0, 2, 3, 4, 5], np.zeros(5))
    assert d.detectable == pytest.approx(detectable(5) * np.sqrt(2.5 / 5))


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04: times 4, 3, 2, 1 is 0.04, 0.06, 0.06, 0.04, made to rise.
    np.testing.assert_allclose(holm([0.04, 0.01, 0.03, 0.02]), [0.06, 0.04, 0.06, 0.06])
    np.testing.assert_allclose(holm([0.6, float("nan"), 0.5]), [1.0, float("nan"), 1.0])  # NaN is no test
    np.testing.assert_allclose(holm([0.04, float("nan"), 0.01]), [0.04, float("nan"), 0.02])  # two tests, not three
    assert holm([]).size == 0


def test_batches_that_disagree():
    one, other = [-0.30, -0.28, -0.26, -0.24], [0.02, -0.01, 0.03, 0.0]
    assert batches_differ([one, other]) == pytest.approx(stats.ttest_ind(one, other, equal_var=False).pvalue)
    assert batches_differ([one, one]) == pytest.approx(1.0)
    assert np.isnan(batches_differ([one]))
    assert np.isnan(batches_differ([one, [0.5]]))  # one difference has no spread
    three = batches_differ([one, other, [0.01, 0.02, -0.02, 0.0]])
    assert batches_differ([one, other]) < three < 0.01  # the smallest of three, corrected


def test_few_pairs_have_no_interval():
    assert np.isnan(paired_difference([1.0], [0.0]).low)
    assert paired_difference([1.0], [0.0]).mean == 1.0
    assert np.isnan(paired_difference([], []).mean)


def test_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match=r"treatment has shape \(2,\), baseline \(1,\), seeds \(2,\)"):
        paired_difference([1, 2], [1])


@pytest.mark.parametrize(
    ("reward", "index"),
    [
        ([0.1, 0.2, 0.3, 0.4], None),
        ([0.8] * 3 + [0.39] * 5, 7),  # the fifth rollout in a row below 0.4
        ([0.8] * 3 + [0.39] * 4 + [0.41] + [0.39] * 4, None),  # never five in a row
        ([1.0] * 3 + [0.5] * 9, None),  # half is not below half
        ([0.2] + [0.8] * 5 + [0.3] * 5, 10),  # the maximum runs
        ([0.5] * 9 + [0.9] + [0.3] * 9, None),  # of means of five: 0.58 here, and one high reward is no bar
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


def test_a_run_that_ends_with_anothers_collapse_was_at_risk():
    assert survival([4, 4, 6], [True, False, False])[1].tolist() == pytest.approx([1, 2 / 3])


def test_survival_without_censoring_is_the_share_alive():
    times, alive = survival([1, 2, 2, 5], [True] * 4)
    np.testing.assert_allclose(times, [0, 1, 2, 5])
    np.testing.assert_allclose(alive, [1, 0.75, 0.25, 0])
    times, alive = survival([7, 7], [False, False])
    assert (times.tolist(), alive.tolist()) == ([0.0], [1.0])


def test_half_of_a_t_interval():
    values = [[1, 5, np.nan], [2, np.nan, np.nan], [3, np.nan, np.nan]]
    half = half_width(np.array(values))
    assert half[0] == pytest.approx(4.302653 / 3**0.5, rel=1e-6)  # t(0.975, 2) sd / sqrt(3), sd = 1
    assert np.isnan(half[1:]).all()
