"""Draws against a reference in NumPy that cuts and renormalises the distribution step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout.sampling import Sampling, answer_keys
from jaxrl_llm.rollout.sampling import draw as sample
from tests.reference.truncated_sampling import truncated

draw = jax.jit(sample, static_argnums=3)
LOGITS = np.array([2.0, 1.5, 1.5, 0.3, -0.2, -1.0, -6.0], np.float32)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.7, 0, 1.0),
        (2.0, 3, 1.0),
        (1.0, 0, 0.6),
        (0.8, 5, 0.9),
        (1.0, 100, 1.0),
        (1.0, 1, 1.0),
        (1.0, 0, 1e-6),
    ],
)
def test_draws_follow_the_cut_distribution(temperature, top_k, top_p):
    n = 8192
    keys = answer_keys(jax.random.key(0), jnp.arange(n), 1)
    sampling = Sampling(temperature, top_k, top_p)
    tokens, logprobs = draw(jnp.tile(LOGITS, (n, 1)), keys, jnp.zeros(n, jnp.int32), sampling)
    expected = truncated(LOGITS, temperature, top_k, top_p)
    np.testing.assert_allclose(logprobs, np.log(expected[np.asarray(tokens)]), atol=1e-6)
    share = np.bincount(tokens, minlength=len(LOGITS)) / n
    assert (share[expected == 0] == 0).all()
    # Five standard deviations of a share of n draws.
    assert (np.abs(share - expected) <= 5 * np.sqrt(expected * (1 - expected) / n) + 1e-9).all()


def test_greedy_is_the_mode_with_log_prob_zero():
    logits = jax.random.normal(jax.random.key(0), (5, 9))
    keys = answer_keys(jax.random.key(1), jnp.arange(5), 1)
    tokens, logprobs = draw(logits, keys, jnp.zeros(5, jnp.int32), Sampling(temperature=0.0))
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    np.testing.assert_array_equal(logprobs, np.zeros(5))


def test_randomness_is_of_the_prompt_the_sample_and_the_index():
    logits = jnp.zeros((6, 1000))
    keys = answer_keys(jax.random.key(0), jnp.array([4, 9]), 3)
    one = draw(logits, keys, jnp.arange(6), Sampling())[0]
    order = jnp.array([5, 0, 3, 1, 4, 2])
    np.testing.assert_array_equal(draw(logits, keys[order], order, Sampling())[0], one[order])
    assert len(set(np.asarray(one).tolist())) == 6
    assert (np.asarray(draw(logits, keys, jnp.arange(6) + 1, Sampling())[0]) != np.asarray(one)).all()


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -0.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1)], ids=str
)
def test_out_of_range_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"rollout\.{field}={value} "):
        Sampling(**{field: value})
