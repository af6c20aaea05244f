"""Draws against a reference in NumPy that cuts and renormalises the distribution step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.selected_logprobs import selected_logprobs
from jaxrl_llm.rollout.sampling import Sampling, answer_keys, exponential
from jaxrl_llm.rollout.sampling import draw as sample
from tests.reference.slowly import first_quick
from tests.reference.truncated_sampling import truncated

draw = jax.jit(sample, static_argnums=3)
LOGITS = np.array([2.0, 1.5, 1.5, 0.3, -0.2, -1.0, -6.0], np.float32)


@pytest.mark.parametrize(
    "cuts",
    [
        (1.0, 0, 1.0),
        (0.7, 0, 1.0),
        (2.0, 3, 1.0),
        (1.0, 2, 1.0),  # of two tokens that are equal the first
        (1.0, 0, 0.6),
        (0.8, 5, 0.9),
        (1.0, 100, 1.0),
        (1.0, 1, 1.0),
        (1.0, 0, 1e-6),
        (1.0, 0, 1.0, 0.2),
        (1.0, 3, 1.0, 0.6),  # both of the two that are equal
        (1.0, 0, 0.8, 0.1),  # fewer than top-p alone, which has less to share out
        (1.0, 6, 0.9, 0.05),
        (1.0, 4, 1.0, 1.0),
    ],
)
def test_draws_follow_the_cut_distribution(cuts):
    n = 8192
    keys = answer_keys(jax.random.key(0), jnp.arange(n), 1)
    sampling = Sampling(*cuts)
    tokens, logprobs, kept = draw(jnp.tile(LOGITS, (n, 1)), keys, jnp.zeros(n, jnp.int32), sampling)
    expected = truncated(LOGITS, *cuts)
    if kept is None:
        assert (expected > 0).all()
    else:
        order = np.argsort(-expected, kind="stable")[: kept.shape[1]]
        np.testing.assert_array_equal(kept, np.tile(np.where(expected[order] > 0, order, -1), (n, 1)))
        assert kept.shape[1] == (sampling.top_k or len(LOGITS))
    np.testing.assert_allclose(logprobs, np.log(expected[np.asarray(tokens)]), atol=1e-6)
    share = np.bincount(tokens, minlength=len(LOGITS)) / n
    assert (share[expected == 0] == 0).all()
    # Five standard deviations of a share of n draws.
    assert (np.abs(share - expected) <= 5 * np.sqrt(expected * (1 - expected) / n) + 1e-9).all()


@pytest.fixture(scope="module")
def smallest():
    """The numbers of the race of the 2^18 words that win it for a rare token."""
    return np.asarray(jax.jit(exponential)(~jnp.arange(2**18, dtype=jnp.uint32)), np.float64)


@pytest.mark.parametrize("p", [1e-6, 1e-7, 1e-8, 1e-9])
def test_rare_tokens_are_drawn_at_their_share(p, smallest):
    """Over all words, not by chance: a number e wins against the smallest of the rest over its weight, which is
    exponential with rate 1 - p, with probability exp(-(1 - p) e / p). The words left out have less than 1e-20."""
    assert np.sum(np.exp(-(1 - p) * smallest / p)) / 2**32 == pytest.approx(p, rel=3e-3 if p < 5e-9 else 5e-5)


def test_the_numbers_of_the_race_are_exponential(smallest):
    """The quantile of every word, at all scales and where the two forms meet: never 0, never infinite."""
    count = np.unique(np.geomspace(1, 2**32, 4000).astype(np.int64) - 1)
    found = np.asarray(jax.jit(exponential)(~jnp.asarray(count.astype(np.uint32))), np.float64)
    np.testing.assert_allclose(found[:-1], -np.log1p(-(count[:-1] + 0.5) / 2**32), rtol=4e-6, atol=0)
    assert 16 < found[-1] < 17
    assert 1e-10 < found[0] == smallest[0]


@pytest.mark.parametrize(("steps", "wins"), [(10, True), (40, True), (49, False), (400, False)])
def test_a_draw_races_with_all_bits_of_its_words(steps, wins, monkeypatch):
    """A token of 2^-26 against one whose number is log 2: it wins below 2^-26 log 2, which is 44.4 steps of 2^-32."""
    words = jnp.array([2**31, 2**32 - 1 - steps], jnp.uint32)
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: words)
    logits, keys = jnp.array([[0.0, -26 * np.log(2)]]), answer_keys(jax.random.key(0), jnp.arange(1), 1)
    assert sample(logits, keys, jnp.zeros(1, jnp.int32), Sampling())[0][0] == wins


def test_a_large_vocabulary_is_drawn_by_blocks_at_its_shares():
    """Two blocks of one size would hide an exchange of them; the last block is not full."""
    vocabulary, n = 1100, 2**14
    logits = np.zeros(vocabulary, np.float32)
    logits[[3, 255, 256, 700, 1099]] = np.log([500, 200, 400, 800, 300])
    keys = answer_keys(jax.random.key(0), jnp.arange(n), 1)
    tokens, logprobs, _ = draw(jnp.tile(logits, (n, 1)), keys, jnp.zeros(n, jnp.int32), Sampling())
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(logprobs, np.log(expected[np.asarray(tokens)]), atol=1e-5)
    share = np.bincount(tokens, minlength=vocabulary) / n
    assert (np.abs(share - expected) <= 5 * np.sqrt(expected * (1 - expected) / n)).all()


@pytest.mark.parametrize("cuts", first_quick(1, [{"top_p": 0.8, "min_p": 0.001}, {"min_p": 0.01}]), ids=str)
def test_a_large_vocabulary_is_cut_alike_by_a_part_and_by_the_whole(cuts):
    """A row whose mass lies in few tokens is drawn the same beside one that needs the whole vocabulary sorted."""
    n, vocabulary = 64, 3000
    sharp = 4 * jax.random.normal(jax.random.key(1), (n, vocabulary))
    keys = answer_keys(jax.random.key(0), jnp.arange(n), 1)
    sampling, zero = Sampling(**cuts), jnp.zeros(n, jnp.int32)
    alone = draw(sharp, keys, zero, sampling)[:2]
    beside = draw(sharp.at[-1].set(0), keys, zero, sampling)[:2]
    for one, other in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(one[:-1], other[:-1])
    for row in range(n - 1):
        expected = truncated(np.asarray(sharp[row]), 1.0, 0, cuts.get("top_p", 1.0), cuts.get("min_p", 0.0))
        np.testing.assert_allclose(alone[1][row], np.log(expected[int(alone[0][row])]), atol=1e-5)
    # The other one is drawn from all of its equal tokens, or from the 2400 of them with 0.8 of the mass.
    np.testing.assert_allclose(beside[1][-1], -np.log(vocabulary * cuts.get("top_p", 1)), atol=2e-3)


def test_greedy_is_the_mode_with_log_prob_zero():
    logits = jax.random.normal(jax.random.key(0), (5, 9))
    keys = answer_keys(jax.random.key(1), jnp.arange(5), 1)
    tokens, logprobs, _ = draw(logits, keys, jnp.zeros(5, jnp.int32), Sampling(temperature=0.0))
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
    ("field", "value"),
    [("temperature", -0.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.1)],
    ids=str,
)
def test_out_of_range_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"rollout\.{field}={value} "):
        Sampling(**{field: value})


def test_a_drawn_token_has_the_bits_that_scoring_gives_it():
    """From the same states in two programs; two formulas gave 83 % of these tokens other bits."""
    rng, n = np.random.default_rng(0), 512
    hidden, head = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((n, 16), (16, 48)))
    keys = answer_keys(jax.random.key(0), jnp.arange(n), 1)
    drawn = jax.jit(lambda hidden, head: draw(hidden @ head, keys, jnp.zeros(n, jnp.int32), Sampling())[:2])
    tokens, logprobs = drawn(hidden, head)
    np.testing.assert_array_equal(logprobs, jax.jit(selected_logprobs)(hidden, head, tokens)[0])
