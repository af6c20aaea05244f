"""The functions behind the parts: golden numbers with and without jit, and the very values of the classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.objectives import corrections, divergences, pair_parts, ratios, surrogates, trust_regions, value, vespo
from tests.reference.answers import make, random_batch

A = jnp.asarray([[1.0, 1.0], [-1.0, -1.0]])
MASK = jnp.asarray([[True, True], [True, False]])
NEW = jnp.log(jnp.asarray([[0.6, 0.2], [0.5, 0.5]]))  # the golden batch of tests/reference/objective_loops.py
X = jnp.log(jnp.asarray([[1.5, 0.5], [2.0, 1.0]]))  # its log-ratios
ROUTER = jnp.asarray([[0.1, 10.0], [0.0, 0.0]])[None, :, :, None]
FAR, IDS = jnp.asarray([[30.0, 1.0], [-30.0, jnp.nan]]), jnp.asarray([[0, 1], [1, 0]])
S = 0.75**0.5  # exp of the mean log-ratio of 1.5 and 0.5
GOLDEN = {
    "token": (lambda: ratios.token_log_ratio(FAR, 0 * X, MASK), [[20, 1], [-20, 0]]),
    "sequence": (lambda: jnp.exp(ratios.sequence_log_ratio(X, MASK)), [[S, S], [2, 1]]),
    "packed": (lambda: jnp.exp(ratios.sequence_log_ratio(X, MASK, IDS)), [[1.5, 1], [1, 1]]),
    "sequence token": (lambda: jnp.exp(ratios.sequence_token_log_ratio(X, MASK)), [[S, S], [2, 1]]),
    "product": (lambda: jnp.exp(ratios.sequence_product(X, MASK)), [[0.75, 0.75], [2, 1]]),
    "router shift": (lambda: ratios.router_shift(-ROUTER, 0 * ROUTER, MASK, 0.8), [[-0.1, np.log(0.8)], [0, 0]]),
    "policy gradient": (lambda: surrogates.policy_gradient(NEW, A), A * NEW),
    "clip": (lambda: surrogates.clip(X, A, 0.2, 0.28), [[1.28, 0.5], [-2, -1]]),
    "dual clip": (lambda: surrogates.clip(X, A, 0.2, 0.2, 1.8), [[1.2, 0.5], [-1.8, -1]]),
    "soft gate": (lambda: surrogates.soft_gate(X, A, 1.0, 1.05), [[2.48983735, 1.51016265], [-2.8219996, -2 / 1.05]]),
    "cispo": (lambda: surrogates.cispo(X, NEW, A, 1.6), A * NEW * jnp.asarray([[1.5, 0.5], [1.6, 1.0]])),
    "geometric mean": (lambda: surrogates.geometric_mean(X, A, 0.4, MASK), [[0.8636614] * 2, [-2, -2]]),
    "vespo": (lambda: vespo.vespo(jnp.log(jnp.asarray([[0.75, 0.75], [2, 1]])), -A, A, (2.0, 3.0), (3.0, 2.0)),
              [[-1.1908125] * 2, [-1.0826823, -1]]),
    "contraction": (lambda: trust_regions.staleness_contraction(X, MASK, 0.25), [[1, 0.3857594], [0.3857594, 1]]),
    "tv": (lambda: trust_regions.binary_divergence(NEW, NEW - X, "tv"), [[0.2, 0.2], [0.25, 0]]),
    "tis": (lambda: corrections.truncated_importance(X, 1.8), [[1.5, 0.5], [1.8, 1]]),
    "icepop": (lambda: corrections.icepop(X, 0.6, 1.8), [[1.5, 0], [0, 1]]),
    "sequence mask": (lambda: corrections.sequence_mask(X, 1.8, MASK), [[1, 1], [0, 0]]),
    "k2": (lambda: divergences.kl_loss(-X, X, "k2"), jnp.exp(X) * X**2 / 2),
    "k3": (lambda: divergences.kl_loss(-X, X, "k3"), jnp.exp(-X) + X - 1),
    "k3_unbiased": (lambda: divergences.kl_loss(-X, X, "k3_unbiased"), 1 + jnp.exp(X) * (X - 1)),
    "low_var_kl": (lambda: divergences.kl_loss(4 * X, X, "low_var_kl"), jnp.minimum(jnp.exp(4 * X) - 4 * X - 1, 10)),
    "abs": (lambda: divergences.kl_loss(-2 * X, X, "abs"), jnp.exp(X) * jnp.abs(2 * X)),
    "value": (lambda: value.value_loss(jnp.asarray([[0.5, 0.1]] * 2), 0 * A, A**0, 0.2), [[0.32, 0.405]] * 2),
    "last token": (lambda: pair_parts.last_token_scores(A, MASK), [[0, 1], [-1, 0]]),
    "logistic": (lambda: pair_parts.logistic_loss(jnp.asarray([1.5, -0.5]), 0.1, 0.1), [0.6359570, 0.7134596]),
    "square": (lambda: pair_parts.square_loss(jnp.asarray([1.0, -0.25]), 0.1), [16, 27.5625]),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_numbers(name):
    function, expected = GOLDEN[name]
    np.testing.assert_allclose(function(), expected, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(jax.jit(function)(), expected, rtol=2e-6, atol=1e-7)


def test_the_ratio_of_a_whole_answer_is_bounded_as_that_of_a_token():
    """12 + 12 is 20 without a gradient; 12 - 2 is 10, to which each of two tokens adds what it has."""

    def log_ratios(logprobs):
        arrays = {"old_logprobs": jnp.zeros((2, 2)), "mask": jnp.ones((2, 2), bool), "advantages": jnp.ones(2)}
        return ratios.AnswerRatio()(objectives.Batch.of(logprobs=logprobs, **arrays))

    logprobs = jnp.asarray([[12.0, 12.0], [12.0, -2.0]])
    np.testing.assert_array_equal(log_ratios(logprobs), [[20, 20], [10, 10]])
    slopes = jax.grad(lambda x: jnp.sum(log_ratios(x)))(logprobs)
    np.testing.assert_array_equal(slopes, [[0, 0], [2, 2]])  # of the answer's two places


def test_a_function_is_what_its_class_computes():
    batch = random_batch(spread=1.0)
    made = objectives.Batch.of(**batch)
    x, a, log_p, mask = made.log_ratio, made.advantages, made.masked("logprobs"), made.mask
    for name, expected in {
        "reinforce": surrogates.policy_gradient(log_p, a),
        "dapo": surrogates.clip(x, a, 0.2, 0.28),
        "gspo": surrogates.clip(ratios.sequence_log_ratio(x, mask), a, 3e-4, 4e-4),
        "gspo_token": surrogates.clip(ratios.sequence_token_log_ratio(x, mask), a, 3e-4, 4e-4),
        "sapo": surrogates.soft_gate(x, a, 1.0, 1.05),
        "cispo": surrogates.cispo(x, log_p, a, 5.0),
        "gmpo": surrogates.geometric_mean(x, a, 0.4, mask),
        "vespo": vespo.vespo(ratios.sequence_product(x, mask), log_p, a, (2.0, 3.0), (3.0, 2.0)),
        "rspo": surrogates.clip(
            x + ratios.router_shift(made.require("router_logprobs"), made.require("old_router_logprobs"), mask, 0.8),
            a, 0.2, 0.2,
        ),
    }.items():  # fmt: skip
        np.testing.assert_array_equal(make(name).policy(made), expected, err_msg=name)
