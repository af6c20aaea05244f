"""SAT's clip that the batch contracts, DPPO's mask, and the ratio to the sampler: numbers by hand, and their limits."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.objectives.ratios import SamplerRatio, TokenRatio
from jaxrl_llm.objectives.surrogates import Clip
from jaxrl_llm.objectives.trust_regions import (
    DivergenceMask,
    PrefixBudgetMask,
    SequenceMaskedClip,
    StalenessClip,
    binary_divergence,
)
from tests.objectives.test_identities import policy
from tests.reference.answers import make, random_batch

TAIL = np.log([1.05, 0.9, 1.1, 0.8, 1.15])  # |log r| 0.0488, 0.1054, 0.0953, 0.2231, 0.1398


def batch_of(log_ratio, advantages, old: Any = 0.5):
    log_ratio = jnp.asarray(log_ratio)[None]
    start = jnp.full(log_ratio.shape, jnp.log(old))
    arrays: dict[str, Any] = {
        "logprobs": start + log_ratio,
        "old_logprobs": start,
        "mask": jnp.ones(log_ratio.shape, bool),
    }
    return objectives.Batch.of(advantages=jnp.broadcast_to(jnp.asarray(advantages), log_ratio.shape), **arrays)


def test_sat_by_hand():
    """Quantile 0.6 of |log r| is 0.1054 + 0.4 (0.1398 - 0.1054) = 0.1191; ratios 0.8 and 1.15 are beyond it.

    c = 1 / (1 + (0.2231 / 0.1191)^2) = 0.2218 and 1 / (1 + (0.1398 / 0.1191)^2) = 0.4208. With A > 0 ratio 1.15 is
    bounded at 1 + 0.2 * 0.4208 = 1.0842 and 1.1 is not; with A < 0 ratio 0.8 is bounded at 1 - 0.2 * 0.2218 = 0.9556
    and 0.9 is not. On their way back to 1, 0.8 with A > 0 and 1.15 with A < 0 are as they were.
    """
    clip = StalenessClip(tail=0.6)
    good = batch_of(TAIL, 1.0)
    np.testing.assert_allclose(clip(good.log_ratio, good)[0], [1.05, 0.9, 1.1, 0.8, 1.0842], rtol=1e-4)
    bad = batch_of(TAIL, -1.0)
    np.testing.assert_allclose(clip(bad.log_ratio, bad)[0], [-1.05, -0.9, -1.1, -0.9556, -1.15], rtol=1e-4)


def test_the_quantile_is_of_the_rows_of_all_devices():
    arrays = {k: jnp.asarray(x, jnp.float32) for k, x in random_batch(spread=1.0).items() if "router" not in k}
    arrays["mask"] = arrays["mask"] > 0
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    loss = jax.jit(lambda x: make("sat", tail=0.3)(**x)[0])
    np.testing.assert_allclose(loss(jax.device_put(arrays, rows)), loss(arrays), rtol=1e-6)


def test_sat_lies_inside_the_plain_clip():
    """Its surrogate is nowhere above the clip's, and equals it where no token is beyond the quantile (tail 1)."""
    batch = objectives.Batch.of(**{k: x for k, x in random_batch(spread=1.0).items() if "router" not in k})
    plain = Clip()(batch.log_ratio, batch)
    adapted = StalenessClip(tail=0.3)(batch.log_ratio, batch)
    assert (adapted <= plain + 1e-6).all()
    assert (adapted < plain - 1e-3).any()
    np.testing.assert_array_equal(StalenessClip(tail=1.0)(batch.log_ratio, batch), plain)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("sat", {"tail": 1.0}), ("opsm", {"delta": 9.0}), ("dppo", {"divergence_low": 2.0, "divergence_high": 2.0})],
)
def test_limits_are_grpo(name, limit):
    """SAT at tail 1 is GRPO, OPSM at a delta that no answer reaches; DPPO without a bound is GRPO without one."""
    batch = random_batch(spread=1.0)
    same = {} if name != "dppo" else {"clip_low": np.inf, "clip_high": np.inf, "aggregation": "token_mean"}
    for got, expected in zip(policy(make(name, **limit), batch), policy(make("grpo", **same), batch), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_masks_by_probability_not_by_ratio(divergence):
    """From 0.01 to 0.05 is ratio 5 and a small D, from 0.5 to 0.8 ratio 1.6 and a large one; ways back stay."""
    mask = DivergenceMask(divergence, 0.1, 0.1)
    q, p = np.asarray([0.01, 0.5, 0.5]), np.asarray([0.05, 0.8, 0.2])
    expected = {
        "tv": np.abs(p - q),
        "kl": q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p)),  # 0.0241, 0.2231, 0.2231
    }[divergence]
    np.testing.assert_allclose(
        binary_divergence(jnp.log(p)[None], jnp.log(q)[None], divergence)[0], expected, rtol=1e-5
    )
    for sign, masked in ((1.0, [False, True, False]), (-1.0, [False, False, True])):
        batch = batch_of(np.log(p / q), sign, old=q)
        value, gradient = jax.value_and_grad(lambda x, s=sign: mask(x, batch_of(x[0], s, old=q)).sum())(batch.log_ratio)
        np.testing.assert_allclose(gradient[0], np.where(masked, 0, sign * p / q), rtol=1e-5)
        np.testing.assert_allclose(value, np.where(masked, 0, sign * p / q).sum(), rtol=1e-5)
        np.testing.assert_array_equal(np.logical_or(*mask.clipped(batch.log_ratio, batch))[0], masked)


def test_cppo_by_hand():
    """One answer of three tokens with A > 0: D = 0.1, 0.1, 0.1, w = 1, 0.9, 0.8, delta 0.15.

    A budget of 0.015: 0.1 <= 0.15; 0.09 <= 0.15 + 0.015 - 0.1 = 0.065 fails; 0.08 <= 0.15 + 0.015 1.9 - 0.19 fails.
    A budget of 0.04: 0.09 <= 0.09; 0.08 <= 0.15 + 0.04 1.9 - 0.19 = 0.036 fails. A late start and a row with two
    answers change nothing, and a way back stays.
    """
    new, old = np.log([0.5, 0.4, 0.6]), np.log([0.4, 0.3, 0.5])
    place, where = {}, np.asarray([[False, True, True, True, False, True, True, True]])
    for name, row in (("logprobs", new), ("sampler_logprobs", old), ("old_logprobs", old)):
        place[name] = np.full((1, 8), -0.1)
        place[name][:, [1, 2, 3]] = place[name][:, [5, 6, 7]] = row
    ids = jnp.asarray([[1, 0, 0, 0, 0, 1, 1, 1]])

    @functools.partial(jax.jit, static_argnums=0)
    def masked(budget, sign):
        more = {"sequence_ids": ids, "num_sequences": 2}
        batch = objectives.Batch.of(advantages=jnp.full((1, 8), sign), mask=jnp.asarray(where), **place, **more)
        return PrefixBudgetMask("tv", 0.15, 0.15, budget, 0.8).clipped(SamplerRatio()(batch), batch)

    for budget, expected in ((0.015, [False, True, True]), (0.0401, [False, False, True])):
        low, high = masked(budget, 1.0)
        np.testing.assert_array_equal(np.asarray(high)[where], expected * 2)
        assert not low.any()
        assert not np.logical_or(*masked(budget, -1.0)).any()


def test_opsm_masks_wrong_answers_that_the_policy_has_left():
    """Mean log(1 / r) is 0.2, 0.05 and -0.2, delta is 0.1; a masked answer has no gradient."""
    log_ratio = jnp.asarray([[-0.5, 0.1], [-0.05, -0.05], [0.1, 0.3]])
    for sign, masked in ((1.0, [False, False, False]), (-1.0, [True, False, False])):
        arrays = {"logprobs": log_ratio, "old_logprobs": jnp.zeros((3, 2)), "mask": jnp.ones((3, 2), bool)}
        batch = objectives.Batch.of(advantages=jnp.full((3,), sign), **arrays)
        surrogate, plain = SequenceMaskedClip(delta=0.1), Clip()
        expected = np.where(np.asarray(masked)[:, None], 0, plain(log_ratio, batch))
        np.testing.assert_array_equal(surrogate(log_ratio, batch), expected)
        low, high = surrogate.clipped(log_ratio, batch)
        plain_low, plain_high = plain.clipped(log_ratio, batch)
        np.testing.assert_array_equal(low, plain_low | np.asarray(masked)[:, None])
        np.testing.assert_array_equal(high, plain_high & ~np.asarray(masked)[:, None])


def test_the_divergence_of_a_certain_token_is_finite():
    log_p = jnp.asarray([[0.0, -1e-9, -30.0]])
    assert np.isfinite(binary_divergence(log_p, log_p[:, ::-1], "kl")).all()
    np.testing.assert_allclose(binary_divergence(log_p, log_p, "kl"), 0, atol=1e-6)


def test_the_ratio_to_the_sampler_is_what_these_recipes_read():
    """With another sampler the loss changes, with another old policy it does not."""
    batch = random_batch()
    moved = batch["old_logprobs"] + 0.1 * np.random.default_rng(0).normal(size=batch["mask"].shape)
    for name in ("sat", "dppo", "cppo", "opsm", "a3po"):
        base = policy(make(name), batch)[0]
        assert policy(make(name), batch | {"old_logprobs": moved})[0] == pytest.approx(base, rel=1e-12)
        assert abs(policy(make(name), batch | {"sampler_logprobs": moved})[0] - base) > 1e-4


def test_decoupled_losses_are_clips_around_their_proximal_policy():
    """Around pi_old with the whole weight it is the correction of that name; A-3PO's p is the sampler up to age 1."""
    batch = random_batch(spread=0.6)
    batch["sampler_logprobs"] = batch["old_logprobs"] + np.random.default_rng(1).normal(size=batch["mask"].shape)
    k, r = (
        np.exp(batch[a] - batch[b]) for a, b in (("old_logprobs", "sampler_logprobs"), ("logprobs", "old_logprobs"))
    )
    a = batch["advantages"][:, None]
    each = k * np.minimum(r * a, np.clip(r, 0.8, 1.2) * a)
    value, gradient = policy(make("grpo", correction="decoupled", aggregation="token_mean"), batch)
    assert value == pytest.approx(-each[batch["mask"]].mean(), rel=1e-9)
    around_old = dataclasses.replace(make("a3po"), ratio=TokenRatio())
    np.testing.assert_allclose(policy(around_old, batch)[1], gradient, rtol=1e-9)

    young = batch | {"age": np.minimum(batch["age"], 1)}
    around_sampler = dataclasses.replace(make("a3po"), ratio=SamplerRatio(), surrogate=Clip())
    for found, expected in zip(policy(make("a3po"), young), policy(around_sampler, young), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert abs(policy(make("a3po"), batch)[0] - policy(around_sampler, batch)[0]) > 1e-3
