"""What must hold between recipes: at ratio one, without bounds, with one token an answer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.objectives.aggregation import Constant, SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from jaxrl_llm.objectives.ratios import SequenceRatio
from jaxrl_llm.objectives.surrogates import Clip
from tests.reference.answers import make, random_batch

AGGREGATIONS = {
    "sequence_mean_token_mean": SequenceMeanTokenMean(),
    "token_mean": TokenMean(),
    "sequence_mean_token_sum": SequenceMeanTokenSum(),
    "constant": Constant(8),
}


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradient(objective, logprobs, batch):
    def loss(x):
        total, count = objective.terms(**{**batch, "logprobs": x})["policy"]
        return total / count

    return jax.value_and_grad(loss)(logprobs)


def policy(objective, batch):
    """(value, gradient) of the policy term in float64; ppo's `values` are of no interest here."""
    with jax.enable_x64(True):
        logprobs = jnp.asarray(batch["logprobs"], jnp.float64)
        blank = {name: np.zeros_like(batch["logprobs"]) for name in ("values", "old_values", "returns")}
        value, gradient = value_and_gradient(objective, logprobs, {**batch, **blank})
    return float(value), np.asarray(gradient)


def with_parts(name, aggregation, surrogate=None):
    objective = make(name)
    return dataclasses.replace(objective, aggregation=aggregation, surrogate=surrogate or objective.surrogate)


SLOW = (
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant",
)  # a recipe and its gradient compile anew for each aggregation


@pytest.mark.parametrize(
    "aggregation",
    [pytest.param(x, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, x in AGGREGATIONS.items()],
)
def test_at_ratio_one_all_have_the_gradient_of_reinforce(aggregation):
    """Identity 1, with a router that has not moved either; dual clip included.

    RLOO has one ratio an answer, whose gradient is that of the sum over its tokens: |y| times the others'.
    """
    batch = random_batch()
    batch |= {"old_logprobs": batch["logprobs"], "sampler_logprobs": batch["logprobs"]}
    batch |= {"router_logprobs": batch["old_router_logprobs"]}
    _, expected = policy(with_parts("reinforce", aggregation), batch)
    lengths = batch["mask"].sum(1, keepdims=True)
    for name in objectives.names("rollouts"):
        if name == "clip_cov":  # holds tokens back at ratio 1 too
            continue
        of_name = expected * lengths if name == "rloo" else expected
        np.testing.assert_allclose(policy(with_parts(name, aggregation), batch)[1], of_name, rtol=1e-9, err_msg=name)
    dual = with_parts("grpo", aggregation, Clip(0.2, 0.2, 3.0))
    np.testing.assert_allclose(policy(dual, batch)[1], expected, rtol=1e-9)


def test_wide_bounds_and_small_temperatures_are_importance_sampling():
    """Identity 2: value and gradient of a clip without bounds; the gradient alone of SAPO as tau goes to 0."""
    batch = random_batch(spread=1.0)
    ratio = np.exp(batch["logprobs"] - batch["old_logprobs"])
    weights = np.where(batch["mask"], 1 / np.maximum(batch["mask"].sum(1, keepdims=True), 1), 0)
    expected = -(ratio * weights * batch["advantages"][:, None]) / 3  # three answers have tokens
    value, gradient = policy(make("grpo", clip_low=np.inf, clip_high=np.inf), batch)
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-9)
    np.testing.assert_allclose(gradient, expected, rtol=1e-9)
    _, soft = policy(make("sapo", tau_pos=1e-5, tau_neg=1e-5), batch)
    np.testing.assert_allclose(soft, expected, rtol=1e-6)


@pytest.mark.parametrize("case", ["one_token", "constant_ratio"])
def test_gspo_is_grpo_where_the_sequence_ratio_is_the_token_ratio(case):
    """Identity 3, with one clip range for both."""
    batch = random_batch(seed=3)
    if case == "one_token":
        batch["mask"] = np.arange(6) == np.asarray([0, 2, 5, 1])[:, None]
    else:
        shift = np.asarray([0.5, -0.5, 0.1, 0.0])[:, None]
        batch["logprobs"] = batch["old_logprobs"] + np.broadcast_to(shift, batch["mask"].shape)
    grpo = policy(make("grpo", clip_low=0.2, clip_high=0.3), batch)
    for name in ("gspo", "gspo_token"):
        value, gradient = policy(make(name, clip_low=0.2, clip_high=0.3), batch)
        np.testing.assert_allclose(value, grpo[0], rtol=1e-9)
        if case == "one_token":
            np.testing.assert_allclose(gradient, grpo[1], rtol=1e-9)
        else:  # every token of an answer has the same weight in both
            np.testing.assert_allclose(gradient, grpo[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS.values(), ids=AGGREGATIONS.keys())
def test_gspo_token_equals_gspo_for_a_constant_advantage(aggregation):
    batch = random_batch(seed=4, spread=0.02)
    sequence, token = (policy(with_parts(name, aggregation), batch) for name in ("gspo", "gspo_token"))
    np.testing.assert_allclose(sequence[0], token[0], rtol=1e-9)
    np.testing.assert_allclose(sequence[1], token[1], rtol=1e-8, atol=1e-12)


def test_gspo_token_differs_from_gspo_where_the_advantage_varies():
    batch = random_batch(seed=4, spread=0.02)
    rng = np.random.default_rng(0)
    batch["advantages"] = rng.normal(size=batch["mask"].shape)
    wide = {"clip_low": 0.5, "clip_high": 0.5}
    (a, ga), (b, gb) = policy(make("gspo", **wide), batch), policy(make("gspo_token", **wide), batch)
    np.testing.assert_allclose(a, b, rtol=1e-9)
    assert np.abs(ga - gb).max() > 0.01


def test_sequence_ratio_is_a_ratio_of_perplexities():
    batch = random_batch()
    made = objectives.Batch.of(**batch)
    mask = batch["mask"][0]
    perplexity = {key: np.exp(-batch[key][0][mask].mean()) for key in ("logprobs", "old_logprobs")}
    log_s = SequenceRatio()(made)[0][mask]
    np.testing.assert_allclose(np.exp(log_s), perplexity["old_logprobs"] / perplexity["logprobs"], rtol=1e-5)


@pytest.mark.parametrize(("tau", "constant"), [(1.0, 0.737), (1.05, 0.758)])
def test_sapo_is_near_a_sequence_gate(tau, constant):
    """|mean_t w(r_t) - w(s)| <= c Var_t(log r): c = tau^2 / 4 for sech^2(tau log r / 2), the given one for w(r)."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(200, 32)) * rng.uniform(0, 0.5, (200, 1)) + rng.normal(size=(200, 1))
    variance = z.var(1)
    for gate, bound in (
        (lambda x: np.cosh(tau * x / 2) ** -2.0, tau**2 / 4),
        (lambda x: np.cosh(tau * np.expm1(x) / 2) ** -2.0, constant),
    ):
        gap = np.abs(gate(z).mean(1) - gate(z.mean(1)))
        assert (gap <= bound * variance + 1e-12).all()
        assert (gap > 0.2 * bound * variance).any()  # the bound says something


def test_router_shift_of_nothing_is_grpo():
    batch = random_batch()
    batch["router_logprobs"] = batch["old_router_logprobs"]
    got, expected = policy(make("rspo"), batch), policy(make("grpo"), batch)
    np.testing.assert_array_equal(got[1], expected[1])


def test_router_shift_carries_no_gradient():
    batch = random_batch()
    gradient = jax.jit(jax.grad(lambda x: make("rspo")(**{**batch, "router_logprobs": x})[0]))(
        jnp.asarray(batch["router_logprobs"])
    )
    assert not np.asarray(gradient).any()


def test_entropy_is_a_bonus_and_the_kl_a_cost():
    """At ratio 1 and advantage 0 the loss is those two terms: 0.2 k3(q) - 0.1 H, log q = log pi_ref - log pi = -0.5."""
    ones = np.ones((1, 3))
    given = {"logprobs": -ones, "old_logprobs": -ones, "advantages": 0 * ones, "mask": ones > 0}
    objective = objectives.make("grpo", kl_coef=0.2, entropy_coef=0.1)
    loss = objective(**given, ref_logprobs=-1.5 * ones, entropy=2 * ones)[0]
    np.testing.assert_allclose(loss, 0.2 * (np.exp(-0.5) - 1 + 0.5) - 0.1 * 2, rtol=1e-5)
