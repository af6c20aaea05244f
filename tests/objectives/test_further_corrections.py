"""Corrections that are chosen by name beyond tis: numbers by hand, loops over ragged, packed and extreme answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.objectives.named_parts import CORRECTIONS, correction_named
from tests.reference import correction_loops as loops

REJECTIONS = [name for name in CORRECTIONS if name.startswith(("token_k", "seq_"))]


def batch_of(log_k, mask, ids=None, **more):
    zeros = jnp.zeros(log_k.shape)
    arrays = {"logprobs": zeros, "old_logprobs": zeros, "sampler_logprobs": -jnp.asarray(log_k), "advantages": zeros}
    packed = {} if ids is None else {"sequence_ids": jnp.asarray(ids)}
    return objectives.Batch.of(**arrays, mask=jnp.asarray(mask), **packed, **more)


def random_gaps(spread):
    rng = np.random.default_rng(0)
    mask = np.arange(5) < np.asarray([5, 2, 1, 0, 4, 3])[:, None]  # one row is empty
    return spread * rng.normal(size=mask.shape), mask


def expected_weights(name, answers, cap):
    loop = getattr(loops, name, None)
    return loop(answers, cap) if loop else loops.rejected(name, answers, cap)


@pytest.mark.parametrize("spread", [0.1, 0.7, 15.0])
@pytest.mark.parametrize("name", [*REJECTIONS, "clamped", "sequence_tis", "sequence_decoupled", "veto", "m2po"])
def test_equals_the_loop(name, spread):
    """Padded, and packed two answers a row; beyond +-20 the log-ratio is bounded, here within it."""
    log_k, mask = random_gaps(spread)
    log_k = np.clip(log_k, -20, 20)
    answers = [row[m].tolist() for row, m in zip(log_k, mask, strict=True) if m.any()]
    correction = correction_named(name)
    expected = np.concatenate(expected_weights(name, answers, correction.cap))
    if name.startswith("sequence_"):  # of the product too
        expected = np.clip(expected, np.exp(-20.0) * (expected > 0), None)
    got = np.asarray(correction(batch_of(log_k, mask)))
    np.testing.assert_allclose(got[mask], expected, rtol=2e-5)
    packed = batch_of(log_k.reshape(3, 10), mask.reshape(3, 10), np.repeat(np.arange(6), 5).reshape(3, 10))
    np.testing.assert_allclose(np.asarray(correction(packed)).reshape(got.shape)[mask], expected, rtol=2e-5)
    assert name == "m2po" or 0 < np.mean(expected == expected.max()) <= 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sequence_tis", [1.2, 1.2]),  # 1.5 * 0.8
        ("sequence_tis*token_k1", [1.2, 1.2]),
        ("sequence_decoupled*tis", [1.8, 0.96]),
        ("token_k2", [1, 1]),  # (log 1.5)^2 / 2 = 0.0822
        ("token_k3", [1, 1]),  # 1.5 - 1 - log 1.5 = 0.0945
        ("seq_sum_k2", [0, 0]),  # 0.0822 + 0.0249
        ("seq_mean_k3", [0, 0]),  # (0.0945 + 0.0231) / 2 is above 0.01
        ("seq_max_k3", [1, 1]),
        ("seq_sum_k1", [1, 1]),  # log 1.2 is within log 2
        ("veto", [1, 1]),
        ("clamped", [1.5, 0.8]),
        ("m2po", [0, 1]),  # squares 0.1644 and 0.0498: both are too many, the smaller alone is kept whatever it is
    ],
)
def test_two_tokens_by_hand(name, expected):
    got = correction_named(name)(batch_of(np.log([[1.5, 0.8]]), np.ones((1, 2), bool)))
    np.testing.assert_allclose(got[0], expected, rtol=1e-6)


def test_a_clamped_weight_stays_in_its_range():
    """By hand, OpenRLHF's defaults: 0.5 to 5."""
    got = correction_named("clamped")(batch_of(np.log([[0.1, 0.7, 9.0]]), np.ones((1, 3), bool)))
    np.testing.assert_allclose(got[0], [0.5, 0.7, 5.0], rtol=1e-6)


def test_one_impossible_token_vetoes_its_answer():
    log_k = np.asarray([[0.0, -12.0, 0.1], [0.0, -9.0, 0.1]])  # e^-12 < 1e-4 < e^-9
    mask = np.ones_like(log_k, bool)
    np.testing.assert_array_equal(correction_named("veto")(batch_of(log_k, mask)), [[0] * 3, [1] * 3])
    mask[0, 1] = False
    np.testing.assert_array_equal(correction_named("veto")(batch_of(log_k, mask)), [[1] * 3, [1] * 3])


def test_the_tokens_of_high_entropy():
    """Ten tokens, one of them masked: the highest 0.2 of nine are those from the 0.8 quantile up."""
    entropy = np.asarray([[0.1, 0.5, 2.0, 0.3, 0.2], [0.9, 0.4, 1.5, 9.0, 0.6]])
    mask = np.ones_like(entropy, bool)
    mask[1, 3] = False
    batch = batch_of(0 * entropy, mask, entropy=jnp.asarray(entropy))
    expected = np.concatenate(loops.high_entropy([row[m].tolist() for row, m in zip(entropy, mask, strict=True)]))
    got = np.asarray(correction_named("high_entropy")(batch))[mask]
    np.testing.assert_array_equal(got, expected)
    assert got.sum() == 2


def test_a_product_needs_what_its_factors_need():
    made = objectives.make("grpo", correction="tis*high_entropy")
    assert made.needs == {"sampler_logprobs", "entropy"}
    assert made.whole_minibatch
    assert not objectives.make("grpo", correction="tis*veto").whole_minibatch


def test_masks_carry_no_gradient():
    log_k, mask = random_gaps(0.3)
    arrays = {"old_logprobs": -1.0 + 0 * log_k, "advantages": jnp.ones(len(mask)), "mask": jnp.asarray(mask)}
    made = objectives.make("reinforce", correction="high_entropy*seq_max_k3")

    def loss(entropy, sampler):
        x = {"logprobs": -1.0 + 0 * log_k, "entropy": entropy, "sampler_logprobs": sampler}
        return made(**arrays, **x)[0]

    slopes = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.asarray(np.abs(log_k)), jnp.asarray(log_k - 1.0))
    assert not any(np.asarray(slope).any() for slope in slopes)


def test_caps_are_checked():
    with pytest.raises(ValueError, match=r"correction_cap=0.5 of k1 bounds the ratio"):
        objectives.make("grpo", correction="seq_sum_k1", correction_cap=0.5)
    with pytest.raises(ValueError, match=r"correction_cap=2.0 is out of range"):
        objectives.make("grpo", correction="high_entropy", correction_cap=2.0)
    assert objectives.make("grpo", correction="seq_mean_k3", correction_cap=0.002).correction.cap == 0.002
