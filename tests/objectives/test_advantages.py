"""Group advantages, GAE, reward shaping and the overlong rules against loops, hand-made numbers and identities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm import objectives
from jaxrl_llm.objectives.advantages import GroupAdvantage, whiten
from jaxrl_llm.objectives.rewards import token_rewards
from tests.reference import advantage_loops


@pytest.mark.parametrize(
    ("std", "baseline", "expected"),
    [
        ("sample", "mean", [1.5, -0.5, -0.5, -0.5]),  # (1 - 1/4) / sqrt((9/16 + 3/16) / 3) = 0.75 / 0.5
        ("population", "mean", [1.7320508, -0.57735027, -0.57735027, -0.57735027]),  # 0.75 / sqrt(0.1875)
        ("none", "mean", [0.75, -0.25, -0.25, -0.25]),
        ("none", "leave_one_out", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("none", "none", [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_one_right_answer_of_four(std, baseline, expected):
    got = objectives.group_advantages(jnp.asarray([1.0, 0, 0, 0]), group_size=4, std=std, baseline=baseline)
    np.testing.assert_allclose(got, expected, atol=5e-6)  # eps 1e-6 moves 1.5 by 3e-6


def test_batch_deviation_is_of_the_raw_rewards():
    """Rewards 1 0 | 3 0: group means 0.5 and 1.5, mean 1, squares 0 + 1 + 4 + 1 = 6, sigma = sqrt(6 / 3)."""
    got = objectives.group_advantages(jnp.asarray([1.0, 0, 3, 0]), group_size=2, std="batch", eps=0.0)
    np.testing.assert_allclose(got, np.asarray([0.5, -0.5, 1.5, -1.5]) / np.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize("std", ["sample", "population", "batch", "none"])
def test_groups_that_only_fill_a_place_change_nothing(std):
    rewards = jnp.asarray([1.0, 0, 3, 0])
    filled = jnp.concatenate([rewards, jnp.full(2, 9.0)])
    found = GroupAdvantage(std)(filled, group_size=2, where=jnp.asarray([True, True, False]))
    np.testing.assert_allclose(found[:4], GroupAdvantage(std)(rewards, group_size=2), rtol=1e-6)
    if std == "batch":  # the guard is needed: without it 9 and 9 would enter
        assert np.abs(GroupAdvantage(std)(filled, group_size=2)[:4] - found[:4]).max() > 0.1


@given(
    st.lists(st.integers(-4, 4).map(float), min_size=12, max_size=12),
    st.sampled_from([1, 3, 12]),
    st.sampled_from([(s, b) for s in ("sample", "population", "batch", "none") for b in ("mean", "leave_one_out")]),
)
def test_group_advantages_equal_the_loop(rewards, size, convention):
    std, baseline = convention
    got = objectives.group_advantages(jnp.asarray(rewards), group_size=size, std=std, baseline=baseline)
    np.testing.assert_allclose(got, advantage_loops.group(rewards, size, std, baseline), rtol=2e-4, atol=2e-5)


@given(st.lists(st.integers(0, 3).map(float), min_size=8, max_size=8), st.permutations(range(4)))
def test_group_identities(rewards, order):
    """The sum is 0, a permutation of the group permutes the advantages, a constant added to all changes nothing."""
    a = np.asarray(objectives.group_advantages(jnp.asarray(rewards), group_size=4))
    np.testing.assert_allclose(a.reshape(2, 4).sum(1), 0, atol=1e-5)
    permuted = np.asarray(rewards).reshape(2, 4)[:, order].ravel()
    np.testing.assert_allclose(
        objectives.group_advantages(jnp.asarray(permuted), group_size=4), a.reshape(2, 4)[:, order].ravel(), atol=1e-6
    )
    shifted = objectives.group_advantages(jnp.asarray(rewards) + 7, group_size=4)
    np.testing.assert_allclose(shifted, a, atol=2e-5)


@pytest.mark.parametrize("std", ["sample", "population", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_alike_answers_give_exactly_zero(std, baseline):
    """Eight rewards of 0.9 have a float32 mean that is not 0.9: dividing by eps would give |A| = 0.056."""
    rewards = jnp.concatenate([jnp.full(8, 0.9), jnp.arange(8.0)])
    got = objectives.group_advantages(rewards, group_size=8, std=std, baseline=baseline)
    assert not np.asarray(got[:8]).any()
    assert np.asarray(got[8:]).any()
    assert not np.asarray(objectives.group_advantages(rewards[8:], group_size=1, std=std, baseline=baseline)).any()


def test_bad_rewards_are_refused():
    with pytest.raises(ValueError, match=r"group_size=3 must divide batch=4; set rollout.group_size"):
        objectives.group_advantages(jnp.zeros(4), group_size=3)
    with pytest.raises(ValueError, match=r"rewards of answers \[1, 3\] are not finite"):
        objectives.group_advantages(jnp.asarray([0.0, np.nan, 1.0, np.inf]), group_size=2)
    with pytest.raises(ValueError, match="did you mean 'sample'"):
        objectives.group_advantages(jnp.zeros(4), group_size=2, std="samples")


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_td_and_monte_carlo_are_the_ends_of_gae(gamma):
    """lambda = 0: A_t = rho_t + gamma V_{t+1} - V_t, so the return bootstraps after one token. lambda = 1: the return
    is the discounted sum of all rewards to come, whatever the values are. Written without GAE's recursion."""
    rng = np.random.default_rng(1)
    rewards, values = rng.normal(size=(2, 1, 5))
    given = (*(jnp.asarray(x, jnp.float32) for x in (rewards, values)), jnp.ones((1, 5), bool))
    step, step_return = objectives.gae(*given, gamma=gamma, lam=0.0)
    target = rewards[0] + gamma * np.append(values[0, 1:], 0.0)
    np.testing.assert_allclose(step_return[0], target, rtol=1e-5)
    np.testing.assert_allclose(step[0], target - values[0], rtol=1e-5, atol=1e-6)
    whole, to_come = objectives.gae(*given, gamma=gamma, lam=1.0)
    sums = [sum(gamma ** (u - t) * rewards[0, u] for u in range(t, 5)) for t in range(5)]
    np.testing.assert_allclose(to_come[0], sums, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(whole[0], sums - values[0], rtol=1e-5, atol=1e-6)
    other = objectives.gae(given[0], 3 * given[1], given[2], gamma=gamma, lam=1.0)[1]
    np.testing.assert_allclose(other, to_come, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_gae_equals_the_definition(gamma, lam):
    """Ragged answers between padding, one of them cut off (it bootstraps) and one with no token at all."""
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 4, 7))
    bootstrap = np.asarray([0.0, 0.7, 0.0, 0.0])
    mask = np.zeros((4, 7), bool)
    mask[0, 1:4], mask[1, 2:7], mask[2, :] = True, True, True
    advantages, returns = objectives.gae(
        *(jnp.asarray(x, jnp.float32) for x in (rewards, values)),
        jnp.asarray(mask),
        gamma=gamma,
        lam=lam,
        bootstrap=jnp.asarray(bootstrap, jnp.float32),
    )
    for i, valid in enumerate(mask):
        expected = advantage_loops.gae(
            rewards[i, valid].tolist(), values[i, valid].tolist(), gamma, lam, float(bootstrap[i])
        )
        np.testing.assert_allclose(advantages[i, valid], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(returns[i, valid], expected[1], rtol=1e-5, atol=1e-6)
        assert not np.asarray(advantages)[i, ~valid].any()
        assert not np.asarray(returns)[i, ~valid].any()


def test_gae_carries_through_a_hole_in_the_mask():
    """Tool output inside an answer: the tokens around it are neighbours."""
    rewards, values = jnp.asarray([[0.0, 9.0, 1.0]]), jnp.asarray([[0.3, 9.0, 0.6]])
    holed, _ = objectives.gae(rewards, values, jnp.asarray([[True, False, True]]), gamma=0.9, lam=0.8)
    dense, _ = objectives.gae(rewards[:, ::2], values[:, ::2], jnp.ones((1, 2), bool), gamma=0.9, lam=0.8)
    np.testing.assert_array_equal(holed[:, ::2], dense)
    assert holed[0, 1] == 0


def test_nan_where_masked_changes_nothing():
    clean = jnp.asarray([[1.0, 2.0, 0.0]])
    dirty = clean.at[0, 2].set(jnp.nan)
    mask = jnp.asarray([[True, True, False]])
    for f in (whiten, lambda x, m: objectives.gae(x, x, m)[0], lambda x, m: objectives.gae(x, x, m)[1]):
        np.testing.assert_array_equal(f(dirty, mask), f(clean, mask))


def test_whitening():
    mask = jnp.asarray([[True, True, True, False]])
    got = whiten(jnp.asarray([[1.0, 2.0, 3.0, 99.0]]), mask)
    np.testing.assert_allclose(got, [[-1.0, 0.0, 1.0, 0.0]], atol=1e-6)  # sample deviation of 1 2 3 is 1
    assert not np.asarray(whiten(jnp.full((2, 3), 0.1), jnp.ones((2, 3), bool))).any()
    assert not np.asarray(whiten(jnp.ones((2, 3)), jnp.zeros((2, 3), bool))).any()


def test_rewards_sit_on_the_last_response_token():
    mask = jnp.asarray([[False, True, True, False], [False, True, True, True], [False] * 4])
    got = token_rewards(jnp.asarray([1.0, -2.0, 5.0]), mask)
    np.testing.assert_array_equal(got, [[0, 0, 1, 0], [0, 0, 0, -2], [0, 0, 0, 0]])


def test_kl_inside_the_reward():
    """rho_t = R 1[t = T] - beta (log pi_old - log pi_ref)_t, and nothing on padding, whatever stands there."""
    mask = jnp.asarray([[True, True, False]])
    old, ref = jnp.asarray([[-1.0, -2.0, jnp.inf]]), jnp.asarray([[-1.5, -1.0, 0.0]])
    got = token_rewards(jnp.asarray([1.0]), mask, old_logprobs=old, ref_logprobs=ref, kl_coef=0.1)
    np.testing.assert_allclose(got, [[-0.05, 1.1, 0.0]], rtol=1e-6)
    with pytest.raises(ValueError, match="needs old_logprobs and ref_logprobs"):
        token_rewards(jnp.asarray([1.0]), mask, kl_coef=0.1)
    moved = token_rewards(jnp.asarray([1.0]), mask, old_logprobs=old, ref_logprobs=ref, kl_coef=jnp.float32(0.1))
    np.testing.assert_array_equal(moved, got)


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_rewards_discounted_by_turn_give_the_advantages_of_a_discount_over_turns(lam):
    """`rewards.turn_gamma`: with r_k and V of turn k times gamma^k, A is gamma^k times GAE with a discount at the ends
    of turns. Observations, with values of 9, are no steps."""
    gamma, rng = 0.8, np.random.default_rng(4)
    turn = np.array([0, 0, -1, 1, 1, 1, -1, -1, 2])
    mask = turn >= 0
    rewards, values = (
        np.where([0, 1, 0, 0, 0, 1, 0, 0, 1], rng.normal(size=9), 0),
        np.where(mask, rng.normal(size=9), 9),
    )
    expected, advantage, value, later = np.zeros(9), 0.0, 0.0, 2
    for t in np.flatnonzero(mask)[::-1]:
        discount = 1.0 if turn[t] == later else gamma
        advantage = rewards[t] + discount * value - values[t] + discount * lam * advantage
        expected[t], value, later = gamma ** turn[t] * advantage, values[t], turn[t]
    scale = np.where(mask, gamma ** np.maximum(turn, 0.0), 1)
    given = [jnp.asarray(x, jnp.float32)[None] for x in (rewards * scale, values * scale)]
    found, _ = objectives.gae(*given, jnp.asarray(mask)[None], lam=lam)
    np.testing.assert_allclose(found[0], expected, atol=1e-6)


def test_gae_recipe_whitens_after_the_returns():
    mask = jnp.asarray([[True, True], [True, False]])
    values = jnp.asarray([[0.5, 0.25], [0.5, 0.0]])
    advantage = objectives.make("ppo", lam=1.0).advantage
    advantages, returns = advantage(jnp.asarray([1.0, 0.0]), values=values, mask=mask)
    np.testing.assert_allclose(returns, [[1, 1], [0, 0]], atol=1e-6)  # R everywhere on the answer
    raw = np.asarray([0.5, 0.75, -0.5])  # R - V
    np.testing.assert_allclose(
        np.asarray(advantages)[np.asarray(mask)], (raw - raw.mean()) / raw.std(ddof=1), rtol=1e-5
    )


def test_a_truncated_answer_bootstraps_and_an_ended_one_does_not():
    mask, values = jnp.ones((2, 2), bool), jnp.asarray([[0.5, 0.5], [0.5, 0.5]])
    _, returns = objectives.gae(jnp.zeros((2, 2)), values, mask, bootstrap=jnp.asarray([0.8, 0.0]))
    np.testing.assert_allclose(returns, [[0.8, 0.8], [0.0, 0.0]], atol=1e-6)


def test_overlong_penalty():
    """L 20, C 4: the ramp begins at 16."""
    got = objectives.overlong_penalty(jnp.asarray([1, 16, 17, 18, 20, 21]), max_length=20, cache=4)
    np.testing.assert_allclose(got, [0, 0, -0.25, -0.5, -1, -1])
    with pytest.raises(ValueError, match=r"cache=0 is out of range; give cache above 0 and at most 20"):
        objectives.overlong_penalty(jnp.asarray([1]), max_length=20, cache=0)


def test_overlong_filter_takes_truncated_answers_out_of_the_count():
    mask = jnp.ones((3, 4), bool)
    kept = objectives.overlong_filter(mask, jnp.asarray([False, True, False]))
    assert float(objectives.make("dapo").counts(kept)["policy"]) == 8
    assert float(objectives.make("grpo").counts(kept)["policy"]) == 2


def test_advantages_under_jit():
    f = jax.jit(lambda r: GroupAdvantage()(r, group_size=4))
    rewards = jnp.asarray([1.0, 0, 0, 0, 1, 1, 1, 1])
    np.testing.assert_allclose(f(rewards), GroupAdvantage()(rewards, group_size=4), rtol=1e-6)
