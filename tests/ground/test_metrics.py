"""Metrics merge exactly and finalize to the documented keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.ground.metrics import (
    EffectiveSize,
    ExplainedVariance,
    Histogram,
    Maximum,
    Mean,
    Moments,
    combine,
    finalize,
    identity,
    merge,
)


def everything(x, where):
    return {
        "mean": Mean.of(x, where),
        "max": Maximum.of(x, where),
        "r": Moments.of(x, where),
        "ess": EffectiveSize.of(x, where),
        "explained": ExplainedVariance.of(x, 0.5 * x + 1, where),
        "p99": Histogram.of(x, where),
    }


measured = jax.jit(everything)


def test_by_hand():
    """w = 1 + x = 1, 2, 3; the fourth is masked."""
    got = finalize(everything(jnp.asarray([0.0, 1.0, 2.0, np.nan]), jnp.asarray([True, True, True, False])))
    assert got.keys() == {"mean", "max", "r_mean", "r_var", "ess", "explained", "p99"}
    assert got["mean"] == 1
    assert got["max"] == 2
    assert got["r_mean"] == 2
    assert got["r_var"] == pytest.approx(2 / 3)
    assert got["ess"] == pytest.approx(36 / (3 * 14))
    assert got["explained"] == pytest.approx(0.75)  # the error is x / 2 - 1, of a quarter of the variance
    assert got["p99"] == pytest.approx(np.exp(2.0), rel=0.15)


def test_a_metric_converts_to_its_number_and_prints_as_it():
    """The numbers of the test above; of Moments the mean. Inside jit, where there is none yet, the fields are shown."""
    x, where = jnp.asarray([0.0, 1.0, 2.0, np.nan]), jnp.asarray([True, True, True, False])
    made = measured(x, where)
    assert {name: float(made[name]) for name in ("mean", "max", "r", "explained")} == pytest.approx(
        {"mean": 1, "max": 2, "r": 2, "explained": 0.75}
    )
    assert str({"mean": made["mean"], "r": made["r"]}) == "{'mean': 1., 'r': mean 2., var 0.666667}"
    assert f"{float(made['explained']):.2f}" == "0.75"
    assert repr(Mean(jnp.asarray([1.0, 3.0]), jnp.asarray([2.0, 2.0]))) == "[0.5 1.5]"  # by layer
    with pytest.raises(TypeError, match="array"):
        float(Mean(np.ones(2), np.ones(2)))
    seen = []
    jax.jit(lambda x: seen.append(repr(Mean.of(x, x > 0))) or x)(x)
    assert seen[0].startswith("Mean(total=")


def test_nothing_is_not_a_number():
    got = finalize(everything(jnp.zeros(3), jnp.zeros(3, bool)))
    assert all(np.isnan(value) for value in got.values())


def test_equal_targets_leave_nothing_to_explain():
    got = finalize({"explained": ExplainedVariance.of(jnp.ones(3), jnp.zeros(3), jnp.ones(3, bool))})
    assert np.isnan(got["explained"])


@given(
    st.lists(st.floats(-5, 5, width=32), min_size=12, max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.integers(1, 11),
)
def test_any_split_gives_the_same(values, where, cut):
    x, m = np.asarray(values, np.float32), np.asarray(where)
    whole = finalize(measured(x, m))
    parts = [measured(x, m & side) for side in (np.arange(12) < cut, np.arange(12) >= cut)]  # of one shape: one program
    merged = finalize(merge(parts))
    assert merged.keys() == whole.keys()
    for key in merged.keys() - {"explained"}:  # its variances may both be rounding
        np.testing.assert_allclose(merged[key], whole[key], rtol=1e-5, atol=1e-5, err_msg=key)


def test_a_loop_merges_like_a_list():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
    where = x > -0.5

    @jax.jit
    def looped(x, where):
        empty = identity(jax.eval_shape(everything, x[0], where[0]))
        return jax.lax.fori_loop(0, len(x), lambda i, metrics: combine(metrics, everything(x[i], where[i])), empty)

    listed = merge([measured(a, b) for a, b in zip(x, where, strict=True)])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), looped(x, where), listed)


def test_a_key_may_be_missing_in_a_minibatch():
    one = {"a": Mean.of(jnp.ones(2), jnp.ones(2, bool))}
    two = {"a": Mean.of(jnp.zeros(2), jnp.ones(2, bool)), "b": Maximum.of(jnp.ones(2), jnp.ones(2, bool))}
    assert finalize(merge([one, two])) == {"a": 0.5, "b": 1.0}


def test_small_variances_survive_float32():
    """Ratios 1 +- 1e-5: storing x and x^2 of the ratio itself would give a variance of 0 or of 1e-7."""
    x = jnp.asarray([1e-5, -1e-5] * 500)
    assert finalize({"r": Moments.of(x, jnp.ones(1000, bool))})["r_var"] == pytest.approx(1e-10, rel=1e-4)


@given(st.floats(-19, 19))
def test_histogram_resolution(log_ratio):
    """A quantile is off by half a bin at most: 5 % of the log-ratio, or 1e-5 near 0."""
    got = Histogram.of(jnp.full(3, log_ratio), jnp.ones(3, bool)).values()[""]
    assert abs(np.log(got) - log_ratio) <= 0.06 * abs(log_ratio) + 1e-5


def test_p99_is_the_ninety_ninth_of_a_hundred():
    for larger, expected in ((1, 0.0), (2, 3.0)):
        x = jnp.where(jnp.arange(100) < larger, 3.0, 0.0)
        got = np.log(Histogram.of(x, jnp.ones(100, bool)).values()[""])
        assert got == pytest.approx(expected, rel=0.06, abs=1e-5)
