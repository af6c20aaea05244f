"""Scores against a full softmax in numpy: aligned with their tokens, within their segment, at the temperature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import scoring
from tests.reference import tiny_training as tiny
from tests.reference.slowly import first_quick

MODEL = tiny.make_model()
# Two answers share the first row, the second row is short.
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]])
TOKENS = np.where(SEGMENTS > 0, np.random.default_rng(0).integers(1, 16, SEGMENTS.shape), 0)


def test_logprobs_and_entropies_equal_a_full_softmax():
    params, temperature = tiny.draw_params(MODEL), 0.7
    score = jax.jit(lambda p: scoring.score(MODEL, p, jnp.asarray(TOKENS), jnp.asarray(SEGMENTS), temperature=0.7))
    found = jax.device_get(score(params).__dict__ | {"routing": None})
    logits = np.asarray(found["hidden"], np.float64) @ np.asarray(params["ends"]["head"], np.float64) / temperature
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row in range(2):
        for t in range(12):
            if SEGMENTS[row, t] == 0 or t == 0 or SEGMENTS[row, t - 1] != SEGMENTS[row, t]:
                assert found["logprobs"][row, t] == found["entropy"][row, t] == 0
            else:
                before = logp[row, t - 1]
                np.testing.assert_allclose(found["logprobs"][row, t], before[TOKENS[row, t]], rtol=1e-4)
                np.testing.assert_allclose(found["entropy"][row, t], -(np.exp(before) * before).sum(), rtol=1e-4)


@pytest.mark.parametrize(
    ("rows", "cut"), first_quick(1, [("shared", False), ("packed", False), ("packed", True)], several=True)
)
def test_a_head_for_some_tokens_gives_their_scores_and_gradients(rows, cut, monkeypatch):
    """A row with nothing wanted, first tokens, padding; as many as a row may have, and fewer."""
    params, segments = tiny.draw_params(MODEL), jnp.asarray(SEGMENTS)
    wanted = jnp.asarray((SEGMENTS > 0) & np.isin(np.arange(12), [0, 2, 4, 6, 8]) & (np.arange(2)[:, None] == 0))

    others = np.random.default_rng(1).integers(1, 16, (2, 12, 3))
    kept = jnp.asarray(np.concatenate([TOKENS[..., None], others], axis=2)) if cut else None

    def of(params, **some):
        found = scoring.score(MODEL, params, jnp.asarray(TOKENS), segments, rows=rows, **some)
        return found.logprobs, found.entropy

    def both(most):
        def loss(params):
            logprobs, entropy = found = of(params, mask=wanted if most else None, kept=kept, most=most)
            return jnp.sum(logprobs * jnp.arange(12.0)[None] + entropy, where=wanted), found

        return jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(params))

    (_, expected), wished = both(0)
    monkeypatch.setattr(scoring, "_ALL", 0)
    for most in (5, 7):
        (_, found), gradient = both(most)
        for some, every in zip(found, expected, strict=True):
            assert (np.where(wanted, every, 0) != 0).sum() >= 3
            np.testing.assert_allclose(some, np.where(wanted, every, 0), rtol=1e-5, atol=1e-6)
        for a, b in zip(*map(jax.tree.leaves, (gradient, wished)), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max() + 1e-9)


def test_only_the_first_token_of_a_segment_has_no_past():
    first = scoring.first_tokens(jnp.asarray(SEGMENTS))
    expected = SEGMENTS == 0
    expected[0, [0, 4]] = expected[1, 0] = True
    np.testing.assert_array_equal(first, expected)


def test_what_a_state_says_is_aligned_with_the_next_token():
    after = jnp.arange(24.0).reshape(2, 12)
    expected = np.zeros((2, 12))
    expected[0, 1:4], expected[0, 5:9], expected[1, 1:3] = [0, 1, 2], [4, 5, 6, 7], [12, 13]
    np.testing.assert_array_equal(scoring.align(after, jnp.asarray(SEGMENTS)), expected)


def test_values_are_linear_in_the_state():
    hidden = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
    head = {"kernel": jnp.array([1.0, -2.0, 0.5, 0.0]), "bias": jnp.array(0.25)}
    expected = hidden @ np.array([1.0, -2.0, 0.5, 0.0]) + 0.25
    np.testing.assert_allclose(scoring.values(head, jnp.asarray(hidden)), expected, rtol=1e-5)
