"""Rewards of named sources: their weighted sum, and each in a metric of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground.metrics import finalize
from jaxrl_llm.objectives import gae, group_advantages
from jaxrl_llm.objectives.reward_shaping import bounded, normalized_sum, timed_rewards
from jaxrl_llm.objectives.rewards import weighted_rewards
from jaxrl_llm.training.reward_sources import RewardConfig, total_rewards

SOURCES = {"verifier": np.asarray([1.0, 0.0, 1.0]), "model": np.asarray([0.5, -2.0, 4.0]), "length": np.zeros(3)}


def test_weighted_sum_and_metrics():
    """1 * verifier - 0.5 * model; the metrics hold what each source said, before its weight."""
    got, metrics = jax.jit(lambda x: weighted_rewards(x, {"verifier": 1.0, "model": -0.5}))(SOURCES)
    np.testing.assert_allclose(got, [0.75, 1.0, -1.0])
    assert finalize(metrics) == pytest.approx({"reward/verifier": 2 / 3, "reward/model": 2.5 / 3, "reward/length": 0})


def test_answers_that_fill_a_place_stay_out_of_the_metrics():
    _, metrics = weighted_rewards(SOURCES, {"model": 1.0}, where=jnp.asarray([True, True, False]))
    assert finalize(metrics)["reward/model"] == pytest.approx(-0.75)


@pytest.mark.parametrize(
    ("sources", "weights", "message"),
    [
        (SOURCES, {}, "weights is empty; give at least one of verifier, model, length a weight"),
        (SOURCES, {"modle": 1.0}, "reward source='modle' is unknown.*did you mean 'model'"),
        ({**SOURCES, "model": np.zeros(2)}, {"model": 1.0}, "give each one number an answer"),
        ({"model": np.zeros((3, 1))}, {"model": 1.0}, "give each one number an answer"),
    ],
)
def test_bad_input(sources, weights, message):
    with pytest.raises(ValueError, match=message):
        weighted_rewards(sources, weights)


def test_rewards_within_bounds():
    """2 (R - 0.5) is 1 -1 -5 7, then within -1 and 2."""
    np.testing.assert_array_equal(bounded(jnp.asarray([1.0, 0, -2, 4]), -0.5, 2.0, (-1.0, 2.0)), [1, -1, -1, 2])
    np.testing.assert_array_equal(bounded(jnp.asarray([1.0, 0]), -0.5, 2.0), [1, -1])


def test_sources_that_are_normalized_first():
    """1 0 | 0 0 and 30 10 | 10 30: each pair is +-1 / sqrt(2), the equal one 0; then 1 and 0.5 of them."""
    sources = {"right": np.asarray([1.0, 0, 0, 0]), "length": np.asarray([30.0, 10, 10, 30])}
    got = normalized_sum(sources, {"right": 1.0, "length": 0.5}, 2)
    np.testing.assert_allclose(got, np.asarray([1.5, -1.5, -0.5, 0.5]) / np.sqrt(2), rtol=1e-5)
    gdpo = group_advantages(got, group_size=2, std="batch")
    np.testing.assert_allclose(gdpo, np.asarray([1.5, -1.5, -0.5, 0.5]) / np.sqrt(5 / 3), rtol=1e-5)


def test_what_a_config_says_reaches_the_rewards():
    config = RewardConfig(functions=("length_of",), normalize=True, scale=2.0, clip=(-1.0, 5.0))
    sources = {"verifier": np.asarray([1.0, 0.0]), "length_of": np.asarray([3.0, 1.0])}
    got, metrics = total_rewards(config, sources, np.ones(2, bool), 2)
    np.testing.assert_allclose(got, [2 * np.sqrt(2), -1], rtol=1e-5)
    assert finalize(metrics)["reward/length_of"] == 2.0
    cut = np.asarray([True, False])
    got, _ = total_rewards(RewardConfig(truncated_scale=0.5), {"verifier": np.ones(2)}, np.ones(2, bool), 2, cut)
    np.testing.assert_array_equal(got, [0.5, 1.0])
    with pytest.raises(ValueError, match=r"rewards.clip=\(1.0, 0.0\) must be a smaller and a larger number"):
        RewardConfig(clip=(1.0, 0.0))


def test_a_reward_of_an_earlier_turn_stands_where_it_was_earned():
    """Two turns around an observation of two tokens, whose values and rewards count for nothing. By hand: V' and A are
    carried over the gap, so A_4 = .9 * .4 - .3 + .72 * .6 = .492 and A_1 = .5 + .9 * .3 - .2 + .72 * .492 = .92424."""
    mask = jnp.asarray([[True, True, False, False, True, True]])
    values = jnp.asarray([[0.1, 0.2, 9.0, 9.0, 0.3, 0.4]])
    earlier = jnp.asarray([[0.0, 0.5, 7.0, 0.0, 0.0, 0.0]])
    placed = timed_rewards(jnp.asarray([1.5]), earlier, mask)
    np.testing.assert_allclose(placed, [[0, 0.5, 0, 0, 0, 1]])
    advantages, _ = gae(placed, values, mask, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(advantages, [[0.7454528, 0.92424, 0, 0, 0.492, 0.6]], rtol=1e-6)
