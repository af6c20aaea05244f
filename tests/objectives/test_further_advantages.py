"""Advantages that are chosen by name: numbers by hand, loops over groups, enumeration, and a run's own choice."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.objectives import further_advantages as further
from jaxrl_llm.objectives.advantages import whiten
from jaxrl_llm.objectives.named_parts import ADVANTAGES
from tests.reference import advantage_loops as loops

REWARDS = np.asarray([1.0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0.5, 0, 2, 1])  # four groups of four
RAGGED = np.arange(6) < np.asarray([6, 3, 1, 4, 2, 5, 6, 1, 3, 3, 2, 6, 1, 2, 3, 4])[:, None]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_equals_the_mean_over_all_sets(k):
    """By enumeration: an answer's advantage is the mean advantage of the sets of k answers that it is in."""
    right = (REWARDS[:12] >= 1).astype(float)
    expected = loops.pass_at_k(right.tolist(), 4, k)
    np.testing.assert_allclose(further.pass_at_k_advantages(jnp.asarray(right), 4, k), expected, atol=1e-6)


def test_pass_at_1_is_the_group_advantage():
    right = jnp.asarray(REWARDS[:12])
    expected = objectives.group_advantages(right, group_size=4, std="population", eps=0.0)
    np.testing.assert_allclose(further.pass_at_k_advantages(right, 4, 1), expected, atol=1e-6)


def test_one_right_answer_of_four_by_pass_at_2():
    """n = 3: q = 3 / 6, s = 1/2; right 1; wrong (1/2 - C(2, 1) / C(3, 1)) / s = -1/3."""
    got = further.PassAtK(2)(jnp.asarray([1.0, 0, 0, 0]), group_size=4)
    np.testing.assert_allclose(got, [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    with pytest.raises(ValueError, match=r"pass_k=5 is above rollout.group_size=4; lower objective.pass_k"):
        further.PassAtK(5)(jnp.zeros(4), group_size=4)


def test_the_best_of_a_group():
    """0.5 0 2 1: (2 - 1) / std, 3 std^2 = 0.375^2 + 0.875^2 + 1.125^2 + 0.125^2; two equal best ones have no lead."""
    got = further.BestOfGroup()(jnp.asarray(REWARDS), group_size=4)
    expected = np.zeros(16)
    expected[14] = 1 / (math.sqrt((0.375**2 + 0.875**2 + 1.125**2 + 0.125**2) / 3) + 1e-6)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_maximum_likelihood():
    """Half right: (1 - 1/2) / (1/2) = 1; 0.5 0 2 1 over its mean 0.875; 0 where all are wrong, or all right."""
    got = further.MaxRL()(jnp.asarray(REWARDS), group_size=4)
    expected = [1, -1, -1, 1, *[0] * 8, *(np.asarray([0.5, 0, 2, 1]) / 0.875 - 1)]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_greedy_answer_is_the_baseline():
    """The last answers earn 1, 0, 1 and 1, and are not compared with anything."""
    got = further.GreedyBaseline()(jnp.asarray(REWARDS), group_size=4)
    np.testing.assert_allclose(got, [0, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, -0.5, -1, 1, 0])


def test_the_optimal_token_baseline_equals_the_loop():
    rng = np.random.default_rng(0)
    squares = rng.uniform(0.1, 0.9, RAGGED.shape)
    logprobs = 0.5 * np.log(squares * rng.uniform(0.1, 1, RAGGED.shape))  # pi^2 is at most the sum of squares
    got = further.optimal_token_advantages(*map(jnp.asarray, (REWARDS, logprobs, squares, RAGGED)), 4)
    lengths = RAGGED.sum(1).tolist()
    np.testing.assert_allclose(got, loops.optimal_token(REWARDS, logprobs, squares, lengths, 4), rtol=1e-5, atol=1e-6)


def test_the_length_weighted_baseline_equals_the_loop():
    got = further.LengthWeighted()(jnp.asarray(REWARDS), group_size=4, mask=jnp.asarray(RAGGED))
    expected = loops.length_weighted(REWARDS.tolist(), RAGGED.sum(1).tolist(), 4)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)
    assert not np.asarray(got[4:12]).any()  # equal rewards


def test_the_prompt_mean_is_a_mean_over_prompts_of_means_over_tokens():
    mask, tokens = jnp.asarray(RAGGED), RAGGED.sum(1)
    made = objectives.make("grpo", advantage="prompt_mean", aggregation="sequence_mean_token_sum")
    scaled = made.advantage(jnp.asarray(REWARDS), group_size=4, mask=mask)
    plain = objectives.group_advantages(jnp.asarray(REWARDS), group_size=4)
    np.testing.assert_allclose(scaled, loops.prompt_mean(plain.tolist(), tokens.tolist(), 4), rtol=1e-5)
    weighed = np.where(RAGGED, np.asarray(scaled)[:, None], 0).sum(1).mean()  # a surrogate r A with r = 1
    groups = [slice(i, i + 4) for i in range(0, 16, 4)]
    prompts = [(np.asarray(plain)[g] * tokens[g]).sum() / tokens[g].sum() for g in groups]
    assert weighed == pytest.approx(np.mean(prompts), rel=1e-5)
    with pytest.raises(ValueError, match="would divide again; use sequence_mean_token_sum"):
        objectives.make("grpo", advantage="prompt_mean")


@pytest.mark.parametrize("std", ["none", "sample"])
def test_group_whitened_equals_the_loop(std):
    got = further.GroupWhitened(std=std)(jnp.asarray(REWARDS), group_size=4, mask=jnp.asarray(RAGGED))
    values = loops.centred(REWARDS.tolist(), 4)
    if std == "sample":
        groups = [np.std(REWARDS[i : i + 4], ddof=1) + 1e-6 for i in range(0, 16, 4) for _ in range(4)]
        values = [x / s for x, s in zip(values, groups, strict=True)]
    expected = loops.whitened([[x] * n for x, n in zip(values, RAGGED.sum(1), strict=True)])
    for row, mask, wanted in zip(np.asarray(got), RAGGED, expected, strict=True):
        np.testing.assert_allclose(row[mask], wanted, rtol=2e-5)
        assert not row[~mask].any()


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_a_kl_inside_the_rewards_of_a_group_equals_the_loop(baseline):
    """As TRL's RLOOTrainer: rewards - beta * (per_token_kl * completion_mask).sum(-1), then the baseline."""
    rng = np.random.default_rng(2)
    old, ref = rng.normal(size=(2, *RAGGED.shape))
    shaped = [x - 0.1 * (o - r)[m].sum() for x, o, r, m in zip(REWARDS, old, ref, RAGGED, strict=True)]
    scale = 4 / 3 if baseline == "leave_one_out" else 1.0
    expected = [scale * x for x in loops.centred(shaped, 4)]
    part = further.GroupOfKlRewards(std="none", baseline=baseline, reward_kl_coef=0.1)
    arrays = {"mask": jnp.asarray(RAGGED), "old_logprobs": jnp.asarray(old), "ref_logprobs": jnp.asarray(ref)}
    np.testing.assert_allclose(part(jnp.asarray(REWARDS), group_size=4, **arrays), expected, rtol=1e-4, atol=1e-6)
    by_turn = jnp.asarray(REWARDS)[:, None] / RAGGED.sum(1, keepdims=True) * RAGGED
    np.testing.assert_allclose(part(by_turn, group_size=4, **arrays), expected, rtol=1e-4, atol=1e-6)
    steered = part(jnp.asarray(REWARDS), group_size=4, **arrays, kl_coef=jnp.zeros(()))
    np.testing.assert_allclose(steered, [scale * x for x in loops.centred(REWARDS.tolist(), 4)], rtol=1e-5, atol=1e-6)
    assert part.needs == {"old_logprobs", "ref_logprobs"}
    assert not further.GroupOfKlRewards().needs


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_return_to_go_equals_the_loop(gamma, beta):
    rng = np.random.default_rng(0)
    old, ref = rng.normal(size=(2, *RAGGED.shape))
    part = further.ReturnToGo(gamma=gamma, reward_kl_coef=beta)
    arrays = {"old_logprobs": jnp.asarray(old), "ref_logprobs": jnp.asarray(ref)}
    got = part(jnp.asarray(REWARDS), mask=jnp.asarray(RAGGED), group_size=4, **arrays)
    gaps = [(o - r)[m].tolist() for o, r, m in zip(old, ref, RAGGED, strict=True)]
    expected = loops.whitened([loops.to_go(x, gap, gamma, beta) for x, gap in zip(REWARDS, gaps, strict=True)])
    for row, mask, wanted in zip(np.asarray(got), RAGGED, expected, strict=True):
        np.testing.assert_allclose(row[mask], wanted, rtol=2e-4, atol=1e-5)


def test_the_length_adaptive_lambda_equals_the_loop():
    rng = np.random.default_rng(1)
    values = rng.normal(size=RAGGED.shape)
    part = further.LengthAdaptiveGae(length_alpha=0.5, lam=0.95)
    advantages, returns = part(jnp.asarray(REWARDS), values=jnp.asarray(values), mask=jnp.asarray(RAGGED))
    raw = []
    for i, mask in enumerate(RAGGED):
        rewards = [0.0] * (mask.sum() - 1) + [REWARDS[i]]
        lam = max(1 - 1 / (0.5 * mask.sum()), 0)
        raw.append(loops.gae(rewards, values[i][mask].tolist(), 1.0, lam, 0.0)[0])
        expected = loops.gae(rewards, values[i][mask].tolist(), 1.0, 0.95, 0.0)[1]
        np.testing.assert_allclose(returns[i][mask], expected, rtol=1e-4, atol=1e-5)
    filled = np.zeros(RAGGED.shape)
    filled[RAGGED] = np.concatenate(raw)
    np.testing.assert_allclose(advantages, whiten(jnp.asarray(filled), jnp.asarray(RAGGED)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_by_name_replaces_that_of_a_recipe(name):
    recipe = "ppo" if ADVANTAGES[name].needs_values else "gspo"
    more = {"aggregation": "sequence_mean_token_sum"} if name == "prompt_mean" else {}
    made = objectives.make(recipe, advantage=name, **more)
    assert made.advantage == ADVANTAGES[name]()
    assert made.surrogate == objectives.make(recipe).surrogate
    assert "A = " in "; ".join(made.formula()[1])
    assert set(objectives.hyperparameters(recipe, advantage=name)) <= {*objectives.fields()}


def test_what_an_advantage_has_no_use_for_is_refused():
    with pytest.raises(ValueError, match="'pass_k'; it belongs to advantage=pass_at_k"):
        objectives.make("grpo", pass_k=2)
    with pytest.raises(ValueError, match=r"advantage='maxlr' is unknown \(did you mean 'maxrl'\?\)"):
        objectives.make("grpo", advantage="maxlr")
    with pytest.raises(ValueError, match="Gae needs a value function"):
        objectives.make("grpo", advantage="length_adaptive")
    with pytest.raises(ValueError, match="ValueLoss needs returns, which MaxRL does not make"):
        objectives.make("ppo", advantage="maxrl")


def test_fields_of_all_recipes_agree_in_type():
    """What `register` checks among recipes that are loaded, for all of them and for the advantages by name."""
    kinds = {}
    for name, chosen in itertools.product(objectives.names("rollouts"), (None, *ADVANTAGES)):
        if chosen and (name == "ppo") != ADVANTAGES[chosen].needs_values:
            continue
        for key, own in objectives.registry._declared(
            objectives.registry._with_named(objectives.recipe(name), None, chosen)
        ).items():
            assert kinds.setdefault(key, own.kind) is own.kind, key


def test_squared_probabilities_come_from_two_temperatures():
    """Softmaxes of three logits at temperature 0.7 and 0.35, whichever token is read."""
    logits = np.array([1.0, -0.5, 2.0])
    at, half = (x - np.log(np.exp(x).sum()) for x in (logits / 0.7, logits / 0.35))
    got = further.squared_probabilities(jnp.asarray(at[None]), jnp.asarray(half[None]))
    np.testing.assert_allclose(got, [[(np.exp(at) ** 2).sum()] * 3], rtol=1e-5)
