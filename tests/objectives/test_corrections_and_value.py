"""Sampler corrections and the value loss: numbers by hand, kinks, detachment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.objectives.corrections import Decoupled, IcePop, SequenceMask, Truncated
from jaxrl_llm.objectives.value import ValueLoss
from tests.reference.answers import corrected, make


def batch(ratios, mask=None, **more):
    """pi_old / mu = ratios, the current policy on the old one."""
    log_k = jnp.log(jnp.asarray(ratios))
    zeros = jnp.zeros_like(log_k)
    full = jnp.ones(log_k.shape, bool) if mask is None else jnp.asarray(mask)
    arrays = {
        "logprobs": zeros,
        "old_logprobs": zeros,
        "sampler_logprobs": -log_k,
        "advantages": zeros + 1,
        "mask": full,
    }
    return {**arrays, **more}


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Truncated(), [[0.1, 1.0, 2.0, 2.0]]),
        (Truncated(4.0), [[0.1, 1.0, 4.0, 4.0]]),
        (IcePop(), [[0.0, 1.0, 4.0, 0.0]]),
        (IcePop(3.0, 0.05), [[0.1, 1.0, 0.0, 0.0]]),
        (Decoupled(), [[0.1, 1.0, 4.0, 8.0]]),
        (Decoupled(4.0), [[0.1, 1.0, 4.0, 0.0]]),
    ],
)
def test_token_weights(correction, expected):
    got = correction(objectives.Batch.of(**batch([[0.1, 1.0, 4.0, 8.0]])))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_sequence_mask_is_length_normalised():
    """1.9 a token is kept at any length; 2.1 is dropped; its inverse likewise; padding does not enter the mean."""
    ratios = np.asarray([[1.9] * 6, [2.1] * 6, [1 / 2.1] * 6, [1.9, 100, 100, 100, 100, 100]])
    mask = np.ones_like(ratios, bool)
    mask[3, 1:] = False
    got = SequenceMask()(objectives.Batch.of(**batch(ratios, mask)))
    np.testing.assert_array_equal(got[:, 0], [1, 0, 0, 1])


@pytest.mark.parametrize(("name", "cap"), [("tis", 2.0), ("icepop", 5.0), ("sequence_mask", 2.0), ("decoupled", None)])
def test_caps_by_name(name, cap):
    assert make("grpo", correction=name).correction.cap == cap
    assert make("grpo", correction=name, correction_cap=3).correction.cap == 3


@pytest.mark.parametrize("name", [name for name in objectives.names("rollouts") if corrected(name, "tis")])
def test_the_correction_multiplies_the_policy_term_alone(name):
    """One answer, ratio one: the corrected total is the weighted one, KL and entropy keep theirs."""
    zeros = jnp.zeros((1, 2))
    extra = {"values": zeros, "old_values": zeros, "returns": zeros, "entropy": zeros + 0.5, "ref_logprobs": zeros - 1}
    router = {"router_logprobs": jnp.zeros((1, 1, 2, 1)), "old_router_logprobs": jnp.zeros((1, 1, 2, 1))}
    arrays = batch([[1.5, 1.5]], logprobs=zeros - 0.3, old_logprobs=zeros - 0.3, **extra, **router)
    arrays["sampler_logprobs"] = arrays["old_logprobs"] - jnp.log(1.5)
    plain, weighted = jax.jit(
        lambda arrays: [make(name, kl_coef=0.1, entropy_coef=0.1, correction=c).terms(**arrays) for c in (None, "tis")]
    )(arrays)
    np.testing.assert_allclose(weighted["policy"][0], 1.5 * plain["policy"][0], rtol=1e-5)
    for term in ("kl", "entropy"):
        np.testing.assert_array_equal(weighted[term][0], plain[term][0])


def test_a_correction_is_detached():
    arrays = batch([[1.5, 1.2]])
    f = jax.grad(lambda x: make("grpo", correction="tis")(**{**arrays, "old_logprobs": x, "sampler_logprobs": x})[0])
    assert not np.asarray(jax.jit(f)(arrays["old_logprobs"])).any()


@jax.jit
def value_and_slope(value, old, target):
    """The value term of PPO for one token, and its slope."""

    def term(v):
        arrays = {"values": v, "old_values": jnp.full((1, 1), old), "returns": jnp.full((1, 1), target)}
        zeros = jnp.zeros((1, 1))
        total, count = make("ppo").terms(
            logprobs=zeros, old_logprobs=zeros, advantages=zeros, mask=jnp.ones((1, 1), bool), **arrays
        )["value"]
        return total / count

    return jax.value_and_grad(term)(jnp.full((1, 1), value))


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        (0.1, 0.0, 1.0, 0.405, -0.9),  # inside the range: 1/2 (0.1 - 1)^2
        (0.5, 0.0, 1.0, 0.32, 0.0),  # clipped to 0.2, whose error is the larger: 1/2 (0.2 - 1)^2
        (-0.5, 0.0, 1.0, 1.125, -1.5),  # clipped to -0.2, whose error is the smaller
        (0.2, 0.0, 1.0, 0.32, -0.8),  # on the bound the gradient flows
    ],
)
def test_value_loss(value, old, target, loss, gradient):
    got, slope = value_and_slope(value, old, target)
    np.testing.assert_allclose([got, slope[0, 0]], [loss, gradient], rtol=1e-6, atol=1e-7)


def test_value_coefficient_and_no_clip():
    parts = objectives.Batch.of(
        **batch([[1.0]]), values=jnp.full((1, 1), 0.5), old_values=jnp.zeros((1, 1)), returns=jnp.ones((1, 1))
    )
    np.testing.assert_allclose(ValueLoss(None, 4.0)(parts), [[0.5]], rtol=1e-6)  # 4 * 1/2 * 0.5^2
