"""Objectives on pairs: hand-made numbers, loops from the papers, gradients, identities, splits, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.metrics import finalize, merge
from tests.objectives.test_splits import gradients
from tests.reference import pair_loops
from tests.reference.slowly import first_quick

NAMES = objectives.names("pairs")
MASK = np.asarray([[1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]], bool)
GOLDEN = {  # rows: chosen, rejected, chosen, rejected
    "mask": MASK,
    "logprobs": np.where(MASK, [[-0.5, -0.5, 9], [9, -1.5, 9], [9, 9, -1.0], [-0.75, -0.75, 9]], 9.0),
    "ref_logprobs": np.where(MASK, -1.0, -9.0),
    "scores": np.asarray([[9.0, 2.0, 9], [9, 1.0, 9], [9, 9, 0.5], [9, 1.0, 9]]),
}


def random_pairs(seed=0, pairs=4, length=6):
    """Ragged answers in float64; a row for each."""
    rng = np.random.default_rng(seed)
    mask = rng.random((2 * pairs, length)) < 0.6
    mask[np.arange(2 * pairs), rng.integers(0, length, 2 * pairs)] = True
    mask[0] = True
    ref = np.log(rng.uniform(0.1, 0.9, mask.shape))
    return {
        "mask": mask,
        "logprobs": ref + 0.5 * rng.normal(size=mask.shape),
        "ref_logprobs": ref,
        "scores": rng.normal(size=mask.shape),
    }


def as_loops(batch):
    """The same pairs as the loops want them: answers without padding."""

    def answer(i):
        valid = batch["mask"][i]
        return {
            "new": batch["logprobs"][i][valid].tolist(),
            "ref": batch["ref_logprobs"][i][valid].tolist(),
            "reward": float(batch["scores"][i][np.flatnonzero(valid)[-1]]),
        }

    return [{"chosen": answer(i), "rejected": answer(i + 1)} for i in range(0, len(batch["mask"]), 2)]


@functools.partial(jax.jit, static_argnums=(0, 3))
def value_and_gradient(objective, learnt, rest, num_sequences=None):
    return jax.value_and_grad(lambda x: objective(**x, **rest, num_sequences=num_sequences)[0])(learnt)


@functools.partial(jax.jit, static_argnums=0)
def metrics_of(objective, batch):
    return objective(**batch)[1]


def evaluated(objective, batch, num_sequences=None):
    """(loss, gradients by the arrays that are learnt) in float64."""
    with jax.enable_x64(True):
        learnt = {key: jnp.asarray(batch[key]) for key in ("logprobs", "scores")}
        rest = {key: jnp.asarray(x) for key, x in batch.items() if key not in learnt}
        return value_and_gradient(objective, learnt, rest, num_sequences)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # log-ratio sums 1 and -0.5 | 0 and 0.5, so D = 1.5 | -0.5; beta 0.1: (log(1 + e^-0.15) + log(1 + e^0.05)) / 2
        ("dpo", 0.66970835),
        # log(1 + e^z) = z + log(1 + e^-z): the 0.1 of swapped labels add 0.1 z, on average 0.1 (0.15 - 0.05) / 2
        ("cdpo", 0.67470835),
        # means 0.5 and -0.5 | 0 and 0.25, so D = 1 | -0.25; the target is 1 / 0.2 = 5: (4^2 + 5.25^2) / 2
        ("ipo", 21.78125),
        # mean log pi -0.5 and -1.5 | -1 and -0.75, so z = 2 - 1 | -0.5 - 1: (log(1 + e^-1) + log(1 + e^1.5)) / 2
        ("simpo", 1.00733748),
        # sums of log pi -1 and -1.5 | -1 and -1.5, D = 0.5 twice: log(1 + e^-0.05); mean log pi -0.5 | -1, so nll 0.75
        ("cpo", 0.668459648 + 0.75),
        # p = e^-0.5, e^-1.5 | e^-1, e^-0.75 and log(1 / p - 1) = -0.4327521, 1.2475175 | 0.5413249, 0.1106465, so z =
        # 1.6802697 | -0.4306783; 0.1 (log(1 + e^-1.6802697) + log(1 + e^0.4306783)) / 2, and nll 0.75
        ("orpo", 0.1 * (0.1708592171 + 0.9314948135) / 2 + 0.75),
        # q = sigma(0.15) | sigma(-0.05) = 0.5374298 | 0.4875026: q log(q / 0.999) + (1 - q) log((1 - q) / 0.001)
        ("exo", (2.5055165555 + 2.8478595644) / 2),
        # r = 0.1 and -0.05 | 0 and 0.05
        ("nca", (0.64439666 + (0.74439666 + 0.66845965) / 2 + 0.69314718 + (0.69314718 + 0.71845965) / 2) / 2),
        ("apo_zero", (1 - 0.52497919 + 0.48750260 + 0.5 + 0.51249740) / 2),
        ("apo_down", (0.52497919 + 1 - 0.53742985 + 0.5 + 1 - 0.48750260) / 2),
        ("kto", (1 - 0.52497919 + 0.48750260 + 0.5 + 0.51249740) / 4),
        # rewards 2 and 1 | 0.5 and 1: (log(1 + e^-1) + log(1 + e^0.5)) / 2
        ("reward_model", 0.64366934),
    ],
)
def test_golden_value(name, expected):
    np.testing.assert_allclose(evaluated(objectives.make(name), GOLDEN)[0], expected, rtol=1e-7)


def test_dpo_with_the_likelihood_of_chosen_answers():
    """The golden DPO loss, and 0.5 times the mean of -mean log pi(chosen), 0.5 | 1."""
    objective = objectives.make("dpo", nll_coef=0.5)
    np.testing.assert_allclose(evaluated(objective, GOLDEN)[0], 0.66970835 + 0.5 * 0.75, rtol=1e-7)
    assert finalize(metrics_of(objective, GOLDEN))["loss/nll"] == pytest.approx(0.375)
    assert objective.formula()[0][1] == "+ 0.5 mean_t log pi(chosen)"


def test_equation_17_of_ipo_is_of_sums():
    """log(pi/pi_ref) of the answers 1 and -0.5, 0 and 0.5: ((1.5 - 5)^2 + (-0.5 - 5)^2) / 2 with tau 0.1."""
    objective = objectives.make("ipo", aggregation="sequence_mean_token_sum")
    np.testing.assert_allclose(evaluated(objective, GOLDEN)[0], 21.25, rtol=1e-7)


def test_metrics_of_the_golden_batch():
    batch = {**GOLDEN, "entropy": np.full((4, 3), 0.5)}
    got = finalize(metrics_of(objectives.make("dpo"), batch))
    expected = {
        "pairs/accuracy": 0.5,
        "pairs/margin": 0.05,  # 0.1 (1.5 - 0.5) / 2
        "pairs/reward_chosen": 0.05,
        "pairs/reward_rejected": 0.0,
        "pairs/logprob_chosen": -1.0,
        "pairs/logprob_rejected": -1.5,
        "pairs/incomplete": 0.0,
        "entropy": 0.5,
        "loss/pairs": 0.66970835,
    }
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-7)
    got = finalize(metrics_of(objectives.make("reward_model", center_rewards_coefficient=0.01), batch))
    assert "pairs/logprob_chosen" not in got
    assert got["loss/centring"] == pytest.approx(0.01 * (9 + 2.25) / 2)
    assert (got["pairs/reward_chosen"], got["pairs/reward_rejected"]) == pytest.approx((1.25, 1.0))


def test_a_tie_counts_one_half():
    batch = {**GOLDEN, "scores": np.zeros((4, 3))}
    assert finalize(metrics_of(objectives.make("reward_model"), batch))["pairs/accuracy"] == 0.5


def test_every_recipe_has_a_loop():
    assert set(NAMES) == set(pair_loops.LOSSES)


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_loops_of_the_paper(name):
    batch = random_pairs()
    batch["logprobs"] = -np.abs(batch["logprobs"])  # probabilities, which ORPO's odds need
    np.testing.assert_allclose(
        evaluated(objectives.make(name), batch)[0], pair_loops.loss(name, as_loops(batch)), rtol=1e-12
    )


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("dpo", {"beta": 2}, {"beta": 2.0}),
        ("cdpo", {"label_smoothing": 0.3}, {"eps": 0.3}),
        ("ipo", {"beta": 0.5}, {"beta": 0.5}),
        ("cpo", {"beta": 0.5, "nll_coef": 0.3}, {"beta": 0.5, "nll": 0.3}),
        ("exo", {"label_smoothing": 0.2}, {"eps": 0.2}),
        ("simpo", {"beta": 1.5, "target_margin": 0.4}, {"beta": 1.5, "gamma": 0.4}),
        ("reward_model", {"target_margin": 0.7, "center_rewards_coefficient": 0.02}, {"margin": 0.7, "centre": 0.02}),
    ],
)
def test_hyperparameters_equal_the_loops(name, ours, theirs):
    batch = random_pairs(1)
    got = evaluated(objectives.make(name, **ours), batch)[0]
    np.testing.assert_allclose(got, pair_loops.loss(name, as_loops(batch), **theirs), rtol=1e-12)


def test_every_pair_has_its_own_margin():
    batch = random_pairs(2)
    margins = np.asarray([0.5, 0.0, 2.0, -1.0])
    rows = np.repeat(np.stack([margins, np.full(4, 99.0)], 1).ravel()[:, None], 6, 1)  # read at the chosen answer
    got = evaluated(objectives.make("reward_model"), {**batch, "margins": rows})[0]
    loops = [pair_loops.reward_model(pair, m) for pair, m in zip(as_loops(batch), margins.tolist(), strict=True)]
    np.testing.assert_allclose(got, np.mean(loops), rtol=1e-12)
    with pytest.raises(ValueError, match="margins do not apply to Square; leave them out"):
        objectives.make("ipo")(**{**batch, "margins": rows})


@pytest.mark.parametrize("name", NAMES)
def test_gradient_equals_finite_differences(name):
    batch, step = random_pairs(3, pairs=2, length=3), 1e-6
    objective = objectives.make(name, **({"center_rewards_coefficient": 0.1} if name == "reward_model" else {}))
    key = "scores" if name == "reward_model" else "logprobs"
    gradient = np.asarray(evaluated(objective, batch)[1][key])
    assert np.abs(gradient).max() > 1e-3
    for place in np.ndindex(gradient.shape):
        ends = []
        for sign in (1, -1):
            moved = batch[key].copy()
            moved[place] += sign * step
            ends.append(float(evaluated(objective, {**batch, key: moved})[0]))
        assert gradient[place] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-8), place


@pytest.mark.parametrize("name", ["dpo", "cdpo"])
def test_at_the_reference_dpo_is_beta_times_reinforce(name):
    """f(z) = -(1 - eps) log sigma(z) - eps log sigma(-z) has f'(0) = -(1 - 2 eps) / 2.

    So the gradient of a pair at pi = pi_ref is -(1 - 2 eps) beta / 2 (grad log pi(chosen) - grad log pi(rejected)),
    half of the preference gradient. REINFORCE with advantages 1 and -1 averages over the 2 P answers what DPO averages
    over P pairs: the half is in its count, and beta (1 - 2 eps) times it is the very same gradient.
    """
    batch = random_pairs(4)
    batch["logprobs"] = batch["ref_logprobs"]
    objective = objectives.make(name, beta=0.3)
    got = np.asarray(evaluated(objective, batch)[1]["logprobs"])
    signs, factor = np.asarray([1.0, -1.0] * 4), 0.3 * (1 - 2 * objective.loss.label_smoothing)
    np.testing.assert_allclose(got, np.where(batch["mask"], -factor / 2 * signs[:, None] / 4, 0), rtol=1e-12)
    reinforce = objectives.make("reinforce")
    with jax.enable_x64(True):
        rest = {"old_logprobs": batch["ref_logprobs"], "advantages": signs, "mask": batch["mask"]}
        f = jax.jit(jax.grad(lambda x: reinforce(logprobs=x, **rest)[0]))
        np.testing.assert_allclose(got, factor * f(jnp.asarray(batch["logprobs"])), rtol=1e-12, atol=1e-16)


def test_a_pair_that_is_already_ordered_pulls_less():
    """DPO's weight is beta sigma(-beta D): nearly beta where the order is wrong, nearly 0 where it is right."""
    one = {"mask": np.ones((2, 1), bool), "ref_logprobs": np.zeros((2, 1)), "scores": np.zeros((2, 1))}
    for difference in (-6.0, 0.0, 6.0):
        batch = {**one, "logprobs": np.asarray([[difference], [0.0]])}
        gradient = evaluated(objectives.make("dpo", beta=1.0), batch)[1]["logprobs"]
        np.testing.assert_allclose(gradient, [[-1 / (1 + np.exp(difference))], [1 / (1 + np.exp(difference))]])


def test_where_the_gradient_ends():
    """cDPO rests at sigma(z) = 1 - eps, IPO at D = 1 / (2 beta); DPO and SimPO never rest."""
    one = {"mask": np.ones((2, 1), bool), "ref_logprobs": np.zeros((2, 1)), "scores": np.zeros((2, 1))}

    def gradient(name, difference, **settings):
        batch = {**one, "logprobs": np.asarray([[difference], [0.0]])}
        return float(evaluated(objectives.make(name, **settings), batch)[1]["logprobs"][0, 0])

    rest = np.log(0.9 / 0.1) / 0.1
    assert abs(gradient("cdpo", rest)) < 1e-12
    assert gradient("cdpo", rest - 1) < 0 < gradient("cdpo", rest + 1)
    assert abs(gradient("ipo", 5.0)) < 1e-12
    assert gradient("ipo", 4.0) < 0 < gradient("ipo", 6.0)
    assert gradient("dpo", 60.0) < 0
    assert gradient("simpo", 6.0) < 0


def test_extremes_stay_finite():
    """Log-ratios of hundreds of nats, and masked places that hold nothing usable."""
    batch = random_pairs(5)
    for scale in (-1e4, 1e4):
        dirty = {**batch, "logprobs": np.where(batch["mask"], scale * batch["logprobs"], np.nan)}
        dirty["scores"] = scale * batch["scores"]
        for name in NAMES:
            loss, gradient = evaluated(objectives.make(name), dirty)
            assert np.isfinite(loss), name
            assert all(np.isfinite(x).all() for x in gradient.values()), name


def test_supervised_training_is_reinforce_of_given_answers():
    """-mean log pi over answer tokens = REINFORCE without a baseline, every given answer earning 1, token_mean."""
    objective = objectives.make("sft")
    assert (objective.reads, objective.needs) == ("answers", frozenset())
    batch = random_pairs(6)
    advantages = objective.advantage(jnp.zeros(8))
    given = {"old_logprobs": batch["logprobs"], "advantages": advantages, "mask": batch["mask"]}
    loss = jax.jit(lambda x: objective(logprobs=x, **given)[0])(batch["logprobs"])
    np.testing.assert_allclose(loss, -batch["logprobs"][batch["mask"]].mean(), rtol=1e-6)


def centred(name):
    return objectives.make(name, **({"center_rewards_coefficient": 0.1} if name == "reward_model" else {}))


@pytest.mark.parametrize("name", first_quick(2, NAMES))
def test_no_split_changes_anything(name):
    """Four pairs as one batch, as micro-batches, and packed in any order with the sequences named."""
    objective, batch = centred(name), random_pairs(7)
    empty = {
        key: np.concatenate([x, np.zeros((2, 6), x.dtype)]) for key, x in batch.items()
    }  # a pair that fills a place
    order = np.asarray([6, 3, 0, 1, 7, 2, 5, 4])
    packed = {key: x[order].reshape(2, 24) for key, x in batch.items()}
    packed["sequence_ids"] = np.repeat(order, 6).reshape(2, 24)
    with jax.enable_x64(True):
        counts = objective.counts(jnp.asarray(batch["mask"]))
        assert {float(x) for x in counts.values()} == {4.0}
        (loss, metrics), whole = gradients(objective, counts, batch)
        (filled, _), _ = gradients(objective, objective.counts(jnp.asarray(empty["mask"])), empty)
        np.testing.assert_allclose(filled, loss, rtol=1e-12)
        halves = [gradients(objective, counts, {key: x[i : i + 4] for key, x in batch.items()}) for i in (0, 4)]
        ids = jnp.asarray(packed["sequence_ids"])
        packed_counts = objective.counts(jnp.asarray(packed["mask"]), ids, 8)
        assert packed_counts == counts
        (packed_loss, packed_metrics), packed_gradient = gradients(objective, packed_counts, packed, 8)
    np.testing.assert_allclose(sum(float(value) for (value, _), _ in halves), loss, rtol=1e-12)
    np.testing.assert_allclose(packed_loss, loss, rtol=1e-12)
    for key, gradient in whole.items():
        np.testing.assert_allclose(np.concatenate([half[key] for _, half in halves]), gradient, rtol=1e-12)
        np.testing.assert_allclose(np.asarray(packed_gradient[key]).reshape(8, 6)[np.argsort(order)], gradient)
    for other in (merge([m for (_, m), _ in halves]), packed_metrics):
        assert finalize(other) == pytest.approx(finalize(metrics), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
@pytest.mark.parametrize("devices", [2, 4])
def test_devices_change_nothing(name, devices):
    """Rows spread over devices, with two pairs on each or one."""
    objective, batch = centred(name), random_pairs(7)
    rows = jax.sharding.NamedSharding(sharding.make_mesh((devices, 1, 1, 1)), jax.sharding.PartitionSpec("data"))
    with jax.enable_x64(True):
        counts = objective.counts(jnp.asarray(batch["mask"]))
        (loss, metrics), gradient = gradients(objective, counts, {key: jnp.asarray(x) for key, x in batch.items()})
        spread = {key: jax.device_put(x, rows) for key, x in batch.items()}
        (spread_loss, spread_metrics), spread_gradient = gradients(objective, counts, spread)
    assert len(spread["logprobs"].sharding.device_set) == devices
    np.testing.assert_allclose(spread_loss, loss, rtol=1e-12)
    assert finalize(spread_metrics) == pytest.approx(finalize(metrics), rel=1e-6, abs=1e-7)
    for key, x in gradient.items():
        np.testing.assert_allclose(spread_gradient[key], x, rtol=1e-12, atol=1e-16)


def test_a_pair_that_was_torn_apart_is_seen():
    """Half a pair adds nothing, is not counted and shows in `pairs/incomplete`."""
    batch = random_pairs(8, pairs=2)
    torn = {**batch, "mask": batch["mask"].copy()}
    torn["mask"][3] = False
    objective = objectives.make("dpo")
    assert float(objective.counts(jnp.asarray(torn["mask"]))["pairs"]) == 1
    loss, gradient = evaluated(objective, torn)
    np.testing.assert_allclose(loss, pair_loops.dpo(as_loops(batch)[0]), rtol=1e-12)
    assert not np.asarray(gradient["logprobs"])[2:].any()
    assert finalize(objective(**torn)[1])["pairs/incomplete"] == 0.5


def test_a_batch_without_a_pair_costs_nothing():
    batch = {**random_pairs(9), "mask": np.zeros((8, 6), bool)}
    for name in NAMES:
        loss, gradient = evaluated(objectives.make(name), batch)
        assert float(loss) == 0
        assert not any(np.asarray(x).any() for x in gradient.values())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dpoo", {}, "objective='dpoo' is unknown.*did you mean 'dpo'"),
        ("dpo", {"betta": 0.1}, "dpo has no hyper-parameter 'betta' .did you mean 'beta'"),
        ("dpo", {"beta": 0}, "beta=0.0 is out of range; give beta above 0"),
        ("cdpo", {"label_smoothing": 0.6}, "label_smoothing=0.6 is out of range; .* between 0 and 0.5"),
        ("simpo", {"target_margin": -1.0}, "target_margin=-1.0 is out of range"),
        ("reward_model", {"center_rewards_coefficient": -1.0}, "center_rewards_coefficient=-1.0 is out of range"),
        ("reward_model", {"aggregation": "sequence_mean_token_mean"}, "would divide a reward"),
        ("dpo", {"aggregation": "token_mean"}, "aggregation='token_mean' is unknown.*sequence_mean_token_sum"),
    ],
)  # fmt: skip
def test_bad_choices_are_refused_with_the_remedy(name, settings, message):
    with pytest.raises(ValueError, match=message):
        objectives.make(name, **settings)


def test_a_value_like_the_other_objectives():
    assert objectives.make("dpo") == objectives.make("dpo", beta=0.1)
    assert len({objectives.make(name) for name in (*NAMES, "dpo")}) == len(NAMES)
    assert objectives.hyperparameters("cdpo") == {
        "beta": 0.1,
        "label_smoothing": 0.1,
        "target_margin": 0.0,
        "nll_coef": 0.0,
        "aggregation": "sequence_mean_token_sum",
    }
    assert objectives.make("reward_model").needs == {"scores"}
