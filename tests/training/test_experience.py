"""From a rollout to a batch: who scores what, advantages, values and the bootstrap of answers that were cut off."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.training.experience import Scorer, _advantages, _gaps
from jaxrl_llm.training.pending import check_updates
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny

MODEL = tiny.make_model()
OFF = ReplayConfig("off", "experts")
PADDED = tiny.in_one_shape(tiny.layout_of(), micro=1)
MASK = np.asarray(tiny.draw_batch().loss_mask)


@functools.cache
def ppo():
    return Learner(MODEL, objectives.make("ppo"), optax.sgd(1.0), rows="packed")


def values_in_numpy(params):
    """V(state before token t) from the model's own hidden states."""
    batch = tiny.draw_batch()
    forward = jax.jit(lambda p: MODEL.apply(p, batch.tokens, segment_ids=batch.segment_ids).hidden)
    after = np.asarray(forward(params)) @ np.asarray(params["value_head"]["kernel"]) + params["value_head"]["bias"]
    return np.asarray(after), np.where(MASK, np.pad(np.asarray(after), ((0, 0), (1, 0)))[:, :-1], 0)


def test_the_critic_on_the_policy():
    params = tiny.draw_params(MODEL, value_head=True)
    state = make_state(MODEL, params, ppo().optimizer)
    batch, _ = tiny.learned(Scorer(ppo(), OFF, tiny.GROUP), state, None, tiny.draw_trajectory(), [PADDED])
    after, before = values_in_numpy(params)
    np.testing.assert_allclose(np.where(MASK, batch.old_values, 0), before, atol=1e-5)
    # gamma = lambda = 1: what is still to come is the reward, and the last state's value where the answer was cut off.
    rewards = np.asarray(tiny.draw_trajectory().rewards)
    coming = rewards + np.where(tiny.ANSWERS == tiny.ANSWER, after[:, -1], 0)
    np.testing.assert_allclose(batch.returns, np.where(MASK, coming[:, None], 0), atol=1e-5)
    raw = (coming[:, None] - before)[MASK]
    white = (raw - raw.mean()) / (raw.std(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.asarray(batch.advantages)[MASK], white, atol=1e-4)


def test_a_separate_critic_values_with_its_own_parameters():
    params, critic = tiny.draw_params(MODEL), tiny.draw_params(MODEL, value_head=True, seed=5)
    state = make_state(MODEL, params, ppo().optimizer, critic)
    batch, _ = tiny.learned(Scorer(ppo(), OFF, tiny.GROUP), state, None, tiny.draw_trajectory(), [PADDED])
    np.testing.assert_allclose(np.where(MASK, batch.old_values, 0), values_in_numpy(critic)[1], atol=1e-5)


def test_only_answers_that_were_cut_off_are_bootstrapped():
    """Row 0 reached its bound; all others ended. The value of the last state enters there and nowhere else."""
    t = tiny.draw_trajectory()
    objective = objectives.make("ppo")

    def returns_of(rollout, last):
        values = jnp.zeros(MASK.shape).at[np.arange(tiny.ROWS), tiny.LENGTHS - 1].set(last)
        scored = rollout.replace(old_logprobs=jnp.zeros(MASK.shape), state_values=values)
        return _advantages(objective, tiny.GROUP, scored)[2]

    returns, shifted = returns_of(t, 0.0), returns_of(t, 3.0)
    np.testing.assert_allclose(shifted[0, tiny.PROMPT :], returns[0, tiny.PROMPT :] + 3, rtol=1e-6)
    np.testing.assert_array_equal(shifted[1:], returns[1:])
    none_cut = t.replace(truncated=jnp.zeros(tiny.ROWS, bool))
    np.testing.assert_array_equal(returns_of(none_cut, 3.0), returns)


def test_a_steered_coefficient_takes_the_place_of_the_objectives_own():
    """gamma = lambda = 1: the return of the first token has all of the answer's KL, times the coefficient."""
    t, batch = tiny.draw_trajectory(), tiny.draw_batch()
    objective = objectives.make("ppo", reward_kl_coef=0.3, kl_target=1.0)
    scored = batch.replace(rewards=t.rewards, truncated=t.truncated, state_values=jnp.zeros(MASK.shape))
    returns = _advantages(objective, tiny.GROUP, scored, jnp.float32(0.05))[2]
    kl = np.sum(np.asarray(batch.old_logprobs - batch.ref_logprobs), axis=1, where=MASK)
    expected = np.asarray(t.rewards) - 0.05 * kl
    found = np.asarray(returns)[:, tiny.PROMPT]
    np.testing.assert_allclose(found[tiny.ANSWERS > 0], expected[tiny.ANSWERS > 0], rtol=1e-4, atol=1e-5)


def test_group_advantages_stand_on_answer_tokens_alone():
    t = tiny.draw_trajectory()
    advantages, values, returns = _advantages(objectives.make("grpo"), tiny.GROUP, t)
    assert values is None
    assert returns is None
    groups = np.asarray(t.rewards, np.float64).reshape(-1, tiny.GROUP)
    expected = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(advantages, np.where(MASK, expected.reshape(-1, 1), 0), rtol=1e-4, atol=1e-6)


def test_groups_without_a_loss_stay_out_of_the_deviation_of_the_batch():
    """As dynamic sampling leaves them at its bound."""
    t = tiny.draw_trajectory()
    fills = jnp.arange(tiny.ROWS) >= tiny.ROWS - tiny.GROUP
    t = t.replace(loss_mask=t.loss_mask & ~fills[:, None])
    objective = objectives.make("grpo", std="batch")
    found, other = (
        _advantages(objective, tiny.GROUP, t.replace(rewards=jnp.where(fills, r, t.rewards)))[0] for r in (0.0, 100.0)
    )
    assert np.abs(np.asarray(found)).max() > 0.1
    np.testing.assert_array_equal(found, other)


def test_one_update_a_rollout_scores_nothing():
    """Its own forward is the old policy; advantages are there, nothing else was computed."""
    learner = Learner(MODEL, objectives.make("grpo"), optax.sgd(1.0))
    state = make_state(MODEL, {}, optax.sgd(1.0))
    scorer = Scorer(learner, OFF, tiny.GROUP, first_forward=True)
    batch, metrics = tiny.learned(scorer, state, None, tiny.draw_trajectory(), [])
    assert metrics == {}
    assert batch.old_logprobs is None
    assert batch.routes.scored is None
    assert np.abs(np.asarray(batch.advantages)).max() > 0.5


def test_one_update_a_rollout_compares_itself_with_the_sampler():
    """Its forward gives the numbers that a scoring pass before it would have given. The reference is another policy."""
    learner = Learner(MODEL, objectives.make("grpo", kl_coef=0.1), optax.sgd(1.0), rows="packed")
    state = lambda: make_state(MODEL, tiny.draw_params(MODEL), learner.optimizer)  # noqa: E731
    policy = Policy(tiny.draw_params(MODEL, seed=1))
    other = learner.score(policy, tiny.draw_trajectory(), [PADDED], {"logprobs", "routing"})
    given = state(), policy, tiny.draw_trajectory(other["routing"]), [PADDED]
    scored, metrics = tiny.learned(Scorer(learner, OFF, tiny.GROUP), *given)
    np.testing.assert_array_equal(scored.ref_logprobs, other["logprobs"])
    assert np.abs(np.asarray(scored.old_logprobs - other["logprobs"])[MASK]).max() > 0.1
    alone, _ = tiny.learned(Scorer(learner, OFF, tiny.GROUP, first_forward=True), *given)
    found, wanted = M.finalize(learner.update(state(), alone, PADDED)[1]), M.finalize(metrics)
    names = [f"check/old_sampler_{part}" for part in ("mean", "share")]
    for name in (*names, "routing/flips_sampler_old", "routing/flips_sampler_old_by_layer"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, err_msg=name)
    assert 0.05 < found["routing/flips_sampler_old"] < 0.9
    with pytest.raises(ValueError, match="step 3: old/sampler"):
        check_updates(3, {}, [found], dtype="float32", sampler_dtype="float32", truncated=False, flipped=0.0)
    check_updates(3, {}, [found], dtype="float32", sampler_dtype="bfloat16", truncated=False, flipped=0.0)


def test_the_gap_to_the_sampler_in_numpy():
    t, batch = tiny.draw_trajectory(), tiny.draw_batch()
    close = jnp.where(jnp.arange(tiny.ROWS)[:, None] < 4, t.sampler_logprobs + 5e-3, batch.old_logprobs)
    found = M.finalize(_gaps(4, dataclasses.replace(batch, old_logprobs=close)))
    gap = np.abs(np.asarray(close - t.sampler_logprobs))[MASK]
    np.testing.assert_allclose(found["check/old_sampler_mean"], gap.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["check/old_sampler_share"], (gap > 1e-2).mean(), rtol=1e-6)
    assert 0 < found["check/old_sampler_share"] < 1
