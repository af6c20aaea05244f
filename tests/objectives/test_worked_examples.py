"""Section by section what the documentation says in words: signs, Clip-Higher, length, GSPO, SAPO's gate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground.metrics import finalize
from tests.reference.answers import make


@functools.partial(jax.jit, static_argnums=0)
def policy_gradient(objective, logprobs, old_logprobs, advantages, mask):
    """The gradient of what is maximised."""
    rest = {"old_logprobs": old_logprobs, "advantages": advantages, "mask": mask}
    return jax.grad(lambda x: -objective(logprobs=x, **rest)[0])(logprobs)


@functools.partial(jax.jit, static_argnums=0)
def metrics_of(objective, arrays):
    return objective(**arrays)[1]


def gradient_weight(objective, ratio, advantage):
    """The gradient of one token's term with respect to its log-probability, over the advantage."""
    with jax.enable_x64(True):
        x = jnp.asarray([[np.log(ratio)]], jnp.float64)
        mask, old = jnp.ones((1, 1), bool), jnp.zeros((1, 1))
        advantages = jnp.asarray([advantage])
        return float(policy_gradient(objective, x, old, advantages, mask)[0, 0]) / advantage


@pytest.mark.parametrize(
    ("advantage", "ratio", "weight"),
    [
        (1.0, 1.19, 1.19),
        (1.0, 1.21, 0.0),  # already likelier than the bound
        (1.0, 0.1, 0.1),  # A > 0: never cut from below
        (-1.0, 0.81, 0.81),
        (-1.0, 0.79, 0.0),
        (-1.0, 1000.0, 1000.0),  # A < 0: unbounded from above
    ],
)
def test_signs(advantage, ratio, weight):
    assert gradient_weight(make("grpo"), ratio, advantage) == pytest.approx(weight, rel=1e-9)


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


def test_dual_clip_bounds_the_other_side():
    objective = make("grpo", dual_clip=3.0)
    assert gradient_weight(objective, 2.9, -1.0) == pytest.approx(2.9)
    assert gradient_weight(objective, 3.1, -1.0) == 0
    assert gradient_weight(objective, 1.1, 1.0) == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("tau", "ratio", "gate"),
    [(1.0, 1, 1.0), (1.0, 0.5, 0.940), (1.0, 1.2, 0.990), (1.0, 1.5, 0.940), (1.0, 2, 0.786), (1.0, 3, 0.420),
     (1.0, 5, 0.071)],
)  # fmt: skip
def test_sapo_gate(tau, ratio, gate):
    assert gradient_weight(make("sapo", tau_pos=tau), ratio, 1.0) / ratio == pytest.approx(gate, abs=5e-4)


def test_sapo_weight_is_bounded_and_fades():
    ratios = np.linspace(0.5, 4, 351)
    weights = [ratio / np.cosh((ratio - 1) / 2) ** 2 for ratio in ratios]
    assert ratios[np.argmax(weights)] == pytest.approx(2.06, abs=0.01)
    assert gradient_weight(make("sapo"), 2.06, 1.0) == pytest.approx(1.575, abs=1e-3)
    assert gradient_weight(make("sapo"), 50.0, -1.0) < 1e-18


def test_clip_higher():
    """eps 0.2: 0.9 may rise to 1.08, so never binds; 0.2 to 0.24 only, so 0.4 gives no gradient."""
    grpo = make("grpo")
    assert gradient_weight(grpo, 0.999 / 0.9, 1.0) > 0
    assert gradient_weight(grpo, 0.4 / 0.2, 1.0) == 0
    assert gradient_weight(grpo, 0.25 / 0.2, 1.0) == 0
    assert gradient_weight(make("dapo"), 0.25 / 0.2, 1.0) > 0


def test_length():
    """Answers of 200 and 10 tokens: 1/200 * 1/2 and 1/10 * 1/2 a token under GRPO, 1/210 each under DAPO."""
    mask = jnp.asarray(np.arange(200) < np.asarray([[200], [10]]))
    x = jnp.zeros((2, 200))

    def gradient(name):
        return np.asarray(policy_gradient(make(name), x, x, jnp.ones(2), mask))[:, 0]

    np.testing.assert_allclose(gradient("grpo"), [1 / 400, 1 / 20], rtol=1e-6)
    np.testing.assert_allclose(gradient("dapo"), [1 / 210, 1 / 210], rtol=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_group_of_equals_gives_no_gradient(reward):
    advantages = objectives.group_advantages(jnp.full(4, reward), group_size=4)
    rng = np.random.default_rng(0)
    x, old = jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32)
    f = jax.grad(
        lambda y: make("sapo")(logprobs=y, old_logprobs=old, advantages=advantages, mask=jnp.ones((4, 3), bool))[0]
    )
    assert not np.asarray(f(x)).any()


def test_gspo_weighs_every_token_of_an_answer_alike():
    """s_i A_i / |y_i| under GSPO, r_t A_i / |y_i| under GRPO; a clipped answer is clipped whole."""
    log_ratio = jnp.asarray([[0.3, -0.1, -0.2], [1.0, 0.1, 0.1]])
    mask, old = jnp.ones((2, 3), bool), jnp.zeros((2, 3))

    def gradient(name):
        objective = make(name, clip_low=0.35, clip_high=0.36)
        return np.asarray(policy_gradient(objective, log_ratio, old, jnp.ones(2), mask))

    np.testing.assert_allclose(gradient("gspo"), [[1 / 6] * 3, [0] * 3], rtol=1e-6)  # s = 1 and e^0.4
    np.testing.assert_allclose(
        gradient("grpo"), np.where(np.exp(log_ratio) > 1.36, 0, np.exp(log_ratio)) / 6, rtol=1e-6
    )


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
