"""Which KL estimators are right as a loss, by exact enumeration over a vocabulary."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.objectives.divergences import k3, kl_loss

VOCABULARY = 5


def policies():
    logits = np.random.default_rng(0).normal(size=(3, VOCABULARY))
    return [jnp.asarray(x) for x in logits]  # current, old, reference


def expected_gradient(estimator, current, behaviour, reference):
    """sum_v behaviour(v) d/dtheta loss(v): the gradient of the term averaged over samples of `behaviour`."""
    weights = jax.nn.softmax(behaviour)

    def average(logits):
        def row(x):
            return x[:, None]

        log_q = row(jax.nn.log_softmax(reference) - jax.nn.log_softmax(logits))
        log_ratio = row(jax.nn.log_softmax(logits) - jax.nn.log_softmax(behaviour))
        values = -log_q if estimator == "k1" else kl_loss(log_q, log_ratio, estimator)
        return jnp.sum(weights * values[:, 0])

    return jax.jit(jax.value_and_grad(average))(current)


def exact(current, reference):
    def kl(logits):
        p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
        return jnp.sum(jnp.exp(p) * (p - q))

    return jax.jit(jax.value_and_grad(kl))(current)


@pytest.mark.parametrize("on_policy", [True, False], ids=["on_policy", "off_policy"])
@pytest.mark.parametrize("estimator", ["k2", "k3_unbiased"])
def test_exact_gradients(estimator, on_policy):
    with jax.enable_x64(True):
        current, old, reference = policies()
        behaviour = current if on_policy else old
        value, gradient = expected_gradient(estimator, current, behaviour, reference)
        kl, expected = exact(current, reference)
    np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-12)
    if estimator == "k3_unbiased":
        np.testing.assert_allclose(value, kl, rtol=1e-10)


@pytest.mark.parametrize("on_policy", [True, False], ids=["on_policy", "off_policy"])
def test_abs_has_the_gradient_of_the_total_variation(on_policy):
    with jax.enable_x64(True):
        current, old, reference = policies()
        _, gradient = expected_gradient("abs", current, current if on_policy else old, reference)
        twice_tv = jax.grad(lambda x: jnp.abs(jax.nn.softmax(x) - jax.nn.softmax(reference)).sum())
        expected = jax.jit(twice_tv)(current)
    np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-12)


def test_plain_k3_is_biased_and_k1_says_nothing():
    with jax.enable_x64(True):
        current, _, reference = policies()
        _, expected = exact(current, reference)
        _, biased = expected_gradient("k3", current, current, reference)
        _, nothing = expected_gradient("k1", current, current, reference)
    assert np.abs(biased - expected).max() > 0.05
    np.testing.assert_allclose(nothing, 0, atol=1e-14)


def test_k3_keeps_its_digits_near_zero():
    """x^2/2 + x^3/6 + ... in float32, where exp(x) - 1 - x itself would be rounding noise."""
    x = np.asarray([1e-8, -1e-6, 1e-4, -5e-3, 0.0999, 0.1001, 0.5, -3.0, 20.0])
    series = sum(x**n / math.factorial(n) for n in range(2, 12))
    expected = np.where(np.abs(x) < 0.2, series, np.expm1(x) - x)
    np.testing.assert_allclose(k3(jnp.asarray(x, jnp.float32)), expected, rtol=5e-6)


def test_the_metric_is_a_mean_over_tokens():
    arrays = {"old_logprobs": jnp.zeros((1, 3)), "mask": jnp.asarray([[True, True, False]]), "advantages": jnp.ones(1)}
    objective = objectives.make("grpo", kl_coef=0.5)
    arrays |= {"logprobs": jnp.zeros((1, 3)), "ref_logprobs": jnp.log(jnp.asarray([[2.0, 0.5, 9.0]]))}
    terms, metrics = jax.jit(lambda arrays: objective.evaluate(**arrays))(arrays)
    k = [1 - np.log(2), -0.5 + np.log(2)]  # q - 1 - log q for q = 2 and 1/2
    np.testing.assert_allclose(terms["kl"][0] / terms["kl"][1], 0.5 * np.mean(k), rtol=1e-6)
    np.testing.assert_allclose(metrics["kl/ref"].values()[""], np.mean(k), rtol=1e-6)
