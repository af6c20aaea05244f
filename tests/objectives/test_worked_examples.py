"""By hand: the gradient on a bound and in a group of equals, and the metrics of an objective."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground.metrics import finalize
from tests.reference.answers import make


@functools.partial(jax.jit, static_argnums=0)
def metrics_of(objective, arrays):
    return objective(**arrays)[1]


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_the_gradient_flows_exactly_on_a_bound(name):
    """Ratios 1.5 and 0.5 are exact in binary, and so is their logarithm's exponential to one unit in the last place."""
    objective = make(name, clip_low=0.5, clip_high=0.5)
    batch = objectives.Batch.of(
        logprobs=jnp.zeros((1, 2)),
        old_logprobs=jnp.zeros((1, 2)),
        advantages=jnp.asarray([[1.0, -1.0]]),
        mask=jnp.ones((1, 2), bool),
    )

    def surrogate(ratio):
        return objective.surrogate(jnp.log(ratio), batch).sum()

    on_bound = jnp.asarray([[1.5, 0.5]])
    assert (jnp.exp(jnp.log(on_bound)) == on_bound).all()
    np.testing.assert_allclose(jax.grad(surrogate)(on_bound), [[1.0, -1.0]], rtol=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_group_of_equals_gives_no_gradient(reward):
    advantages = objectives.group_advantages(jnp.full(4, reward), group_size=4)
    rng = np.random.default_rng(0)
    x, old = jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32)
    f = jax.grad(
        lambda y: make("sapo")(logprobs=y, old_logprobs=old, advantages=advantages, mask=jnp.ones((4, 3), bool))[0]
    )
    assert not np.asarray(f(x)).any()


def test_metrics_of_the_golden_batch():
    """Ratios 1.5 0.5 | 2 with A = 1 1 | -1: weights 0 0.5 | 2, one token of three clipped high."""
    ratios = jnp.asarray([[1.5, 0.5], [2.0, 1.0]])
    arrays = {
        "logprobs": jnp.log(ratios),
        "old_logprobs": jnp.zeros((2, 2)),
        "advantages": jnp.asarray([1.0, -1.0]),
        "mask": jnp.asarray([[True, True], [True, False]]),
        "sampler_logprobs": jnp.log(jnp.asarray([[0.4, 1.0], [1.0, 1.0]])),  # pi_old / mu = 2.5, 1, 1
        "ref_logprobs": jnp.log(ratios) + jnp.log(jnp.asarray([[2.0, 1.0], [1.0, 1.0]])),
        "entropy": jnp.asarray([[0.3, 0.6], [0.9, 9.0]]),
    }
    got = finalize(metrics_of(make("grpo", correction="tis"), arrays))
    expected = {
        "ratio/token_mean": 4 / 3,
        "ratio/token_var": (2.25 + 0.25 + 4) / 3 - 16 / 9,
        "ratio/token_max": 2.0,
        "ratio/ess": 16 / (3 * 6.5),
        "ratio/sequence_mean": (0.75**0.5 + 2) / 2,
        "ratio/sequence_var": ((2 - 0.75**0.5) / 2) ** 2,
        "ratio/sequence_max": 2.0,
        "clip/low": 0.0,
        "clip/high": 1 / 3,
        "gradient_weight/positive": 0.25,  # (2 * 0 + 1 * 0.5) / 2, the correction inside
        "gradient_weight/negative": 2.0,
        "kl/old": (4 - 3 - np.log(1.5)) / 3,  # mean of r - 1 - log r
        "kl/sampler": (2.5 - 1 - np.log(2.5)) / 3,
        "mismatch/mean": np.log(2.5) / 3,
        "mismatch/max": np.log(2.5),
        "mismatch/above_2": 1 / 3,
        "mismatch/weight": 4 / 3,
        "kl/ref": (2 - 1 - np.log(2)) / 3,
        "entropy": 0.6,
        "loss/policy": -((2 * 1.2 + 0.5) / 2 - 2) / 2,
    }
    assert got.keys() == expected.keys() | {"ratio/token_p99", "gradient_weight/positive_rare"}
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert got["ratio/token_p99"] == pytest.approx(2.0, rel=0.1)


def test_a_symmetric_clip_takes_the_gradient_of_rare_tokens():
    """Both tokens rise by 0.25: a ratio of 4/3 from 0.75, of 8/3 from 0.15. A bound of 2 cuts the second alone."""
    old = jnp.asarray([[0.75, 0.15]])
    arrays = {"logprobs": jnp.log(old + 0.25), "old_logprobs": jnp.log(old), "mask": jnp.ones((1, 2), bool)}
    got = finalize(metrics_of(make("grpo", clip_high=1.0), {**arrays, "advantages": jnp.ones(1)}))
    assert got["gradient_weight/positive"] == pytest.approx(4 / 3 / 2, rel=1e-5)
    assert got["gradient_weight/positive_rare"] == 0


def test_what_a_critic_explains():
    """Returns 0 0 1 1 and values 0 0.5 0.5 1: errors 0 -0.5 0.5 0 of variance 1/8, half of the returns' 1/4."""
    arrays = {"logprobs": jnp.zeros((1, 4)), "old_logprobs": jnp.zeros((1, 4)), "mask": jnp.ones((1, 4), bool)}
    values = jnp.asarray([[0.0, 0.5, 0.5, 1.0]])
    arrays |= {"values": values, "old_values": values, "returns": jnp.asarray([[0.0, 0.0, 1.0, 1.0]])}
    got = finalize(metrics_of(make("ppo"), {**arrays, "advantages": jnp.ones((1, 4))}))
    assert got["value/explained_variance"] == pytest.approx(0.5, rel=1e-5)


def test_gate_and_weight_of_other_surrogates():
    ratios = jnp.asarray([[0.5, 8.0]])
    arrays = {"logprobs": jnp.log(ratios), "old_logprobs": jnp.zeros((1, 2)), "mask": jnp.ones((1, 2), bool)}
    sapo = finalize(metrics_of(make("sapo"), {**arrays, "advantages": jnp.ones(1)}))
    gates = np.cosh((np.asarray([0.5, 8.0]) - 1) / 2) ** -2.0
    assert sapo["gate/mean"] == pytest.approx(gates.mean(), rel=1e-5)
    assert sapo["gradient_weight/positive"] == pytest.approx((gates * [0.5, 8]).mean(), rel=1e-5)
    cispo = finalize(metrics_of(make("cispo"), {**arrays, "advantages": -jnp.ones(1)}))
    assert cispo["clip/high"] == 0.5
    assert cispo["gradient_weight/negative"] == pytest.approx((0.5 + 5) / 2, rel=1e-5)
    assert np.isnan(cispo["gradient_weight/positive"])  # no token with A > 0
    gspo = finalize(metrics_of(make("gspo"), {**arrays, "advantages": -jnp.ones(1)}))
    assert gspo["gradient_weight/negative"] == pytest.approx(2.0, rel=1e-5)  # s = sqrt(0.5 * 8) on both tokens
