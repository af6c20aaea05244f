"""Rewards of named sources: their weighted sum, and each in a metric of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground.metrics import finalize
from jaxrl_llm.objectives.rewards import weighted_rewards

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
