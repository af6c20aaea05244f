"""No split of a batch changes its gradient: micro-batches, padding, packing, for every recipe and aggregation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground.metrics import finalize, merge
from tests.reference.answers import corrected, make, random_batch
from tests.reference.slowly import first_quick

AGGREGATIONS = ["sequence_mean_token_mean", "token_mean", "sequence_mean_token_sum", "constant"]
# Every aggregation with a surrogate of tokens and with one that needs its sequence; the rest of the product is long.
PAIRS = [
    ("ppo", "token_mean"),
    ("sapo", "sequence_mean_token_mean"),
    ("cispo", "constant"),
    ("rspo", "sequence_mean_token_sum"),
    ("gmpo", "token_mean"),
    ("gspo", "sequence_mean_token_mean"),
    ("gspo_token", "constant"),
    ("vespo", "sequence_mean_token_sum"),
    ("dppo", "token_mean"),
    ("sat", "sequence_mean_token_mean"),
]
RECIPES = objectives.names("rollouts")
WHOLE_MINIBATCH = [name for name in RECIPES if make(name).whole_minibatch]  # settings refuse micro-batches for them


def pairs(recipes):
    """The recipes with every aggregation."""
    known = [pair for pair in PAIRS if pair[0] in recipes]
    rest = [(name, aggregation) for name in recipes for aggregation in AGGREGATIONS if (name, aggregation) not in known]
    return first_quick(4, known, several=True) + [
        pytest.param(*pair, marks=[pytest.mark.slow, pytest.mark.long]) for pair in rest
    ]


def objective_of(name, aggregation):
    extra = {"aggregation": aggregation}
    if aggregation == "constant":
        extra["max_length"] = 8
    return objectives.make(
        name, kl_coef=0.1, entropy_coef=0.02, **corrected(name, "sequence_mask", correction_cap=1.1), **extra
    )


def full_batch():
    """Float64 arrays of four ragged answers, advantages per token, everything any recipe needs."""
    batch = random_batch(seed=5)
    rng = np.random.default_rng(1)
    old, shape = batch["old_logprobs"], batch["mask"].shape
    noise = rng.normal(size=(6, *shape))
    batch |= {"ref_logprobs": old + 0.2 * noise[0], "sampler_logprobs": old + 0.2 * noise[1]}
    batch |= {"values": noise[2], "old_values": noise[3], "returns": noise[4], "entropy": np.abs(noise[5])}
    batch["advantages"] = np.repeat(batch["advantages"][:, None], shape[1], 1)
    return batch


def take(batch, rows):
    return {key: x[:, rows] if key.endswith("router_logprobs") else x[rows] for key, x in batch.items()}


@functools.partial(jax.jit, static_argnums=(0, 3))
def gradients(objective, counts, batch, num_sequences=None):
    """What one micro-batch adds: the gradient of the sum of its totals over the minibatch's counts."""

    def total(x):
        terms, metrics = objective.evaluate(**{**batch, **x}, num_sequences=num_sequences)
        return sum(value / jnp.maximum(counts[name], 1) for name, (value, _) in terms.items()), metrics

    names = ("logprobs", "values", "entropy", "scores")
    return jax.value_and_grad(total, has_aux=True)({name: batch[name] for name in names if name in batch})


def test_what_reads_the_whole_minibatch_says_so():
    """SAT's quantile is of the minibatch: the halves have their own, so that their gradients do not add up."""
    assert WHOLE_MINIBATCH == ["sat", "clip_cov", "kl_cov"]
    shift = np.log([[1.05, 1.15], [2.7, 3.0]])
    batch = {"old_logprobs": np.full((2, 2), -2.0), "mask": np.ones((2, 2), bool), "advantages": np.ones((2, 2))}
    batch |= {"logprobs": shift - 2.0, "sampler_logprobs": batch["old_logprobs"]}
    objective, counts = make("sat", tail=0.5), {"policy": 2.0}
    whole = gradients(objective, counts, batch)[1]["logprobs"]
    halves = [gradients(objective, counts, take(batch, rows))[1]["logprobs"] for rows in (slice(0, 1), slice(1, 2))]
    assert whole[0].all(), "ratios 1.05 and 1.15 are below the median of both rows"
    assert not halves[0][0, 1]


@pytest.mark.parametrize(("name", "aggregation"), pairs([name for name in RECIPES if name not in WHOLE_MINIBATCH]))
def test_micro_batches_add_up(name, aggregation):
    objective, batch = objective_of(name, aggregation), full_batch()
    with jax.enable_x64(True):
        counts = objective.counts(jnp.asarray(batch["mask"]))
        (loss, metrics), whole = gradients(objective, counts, batch)
        halves = [gradients(objective, counts, take(batch, rows)) for rows in (slice(0, 2), slice(2, 4))]
        np.testing.assert_allclose(loss, sum(value for (value, _), _ in halves), rtol=1e-10)
        for key, gradient in whole.items():
            parts = np.concatenate([half[key] for _, half in halves])
            np.testing.assert_allclose(parts, gradient, rtol=1e-10, atol=1e-14)
    merged, expected = finalize(merge([m for (_, m), _ in halves])), finalize(metrics)
    assert merged.keys() == expected.keys()
    for key, value in expected.items():
        assert merged[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize(("name", "aggregation"), pairs(RECIPES))
def test_packed_rows_equal_padded_rows(name, aggregation):
    """Four answers of six positions in two rows of twelve: the same numbers, with the sequences named."""
    objective, batch = objective_of(name, aggregation), full_batch()
    ids = np.repeat(np.arange(4), 6).reshape(2, 12)
    packed = {
        key: x.reshape(x.shape[0], 2, 12, x.shape[-1]) if key.endswith("router_logprobs") else x.reshape(2, 12)
        for key, x in batch.items()
    }
    packed["sequence_ids"] = ids
    with jax.enable_x64(True):
        counts = objective.counts(jnp.asarray(batch["mask"]))
        packed_counts = objective.counts(jnp.asarray(packed["mask"]), jnp.asarray(ids), 4)
        assert {k: float(v) for k, v in counts.items()} == {k: float(v) for k, v in packed_counts.items()}
        (loss, _), expected = gradients(objective, counts, batch)
        (packed_loss, _), got = gradients(objective, packed_counts, packed, 4)
    np.testing.assert_allclose(packed_loss, loss, rtol=1e-10)
    for key, gradient in expected.items():
        np.testing.assert_allclose(got[key].reshape(4, 6), gradient, rtol=1e-9, atol=1e-14)


def test_the_number_of_sequences_may_be_left_out():
    batch = full_batch()
    ids = np.broadcast_to(np.asarray([[5], [0], [3], [1]]), (4, 6))  # any distinct numbers below b * t
    batch = {key: x for key, x in batch.items() if "router" not in key}
    terms = jax.jit(lambda batch: make("gspo").terms(**batch))
    np.testing.assert_allclose(terms(batch | {"sequence_ids": ids})["policy"], terms(batch)["policy"], rtol=1e-6)


@pytest.mark.parametrize(("name", "aggregation"), pairs(RECIPES))
def test_padding_changes_nothing(name, aggregation):
    objective, batch = objective_of(name, aggregation), full_batch()
    wider = {}
    for key, x in batch.items():
        axis = 2 if key.endswith("router_logprobs") else 1
        wider[key] = np.pad(x, [(0, 3 if i == axis else 0) for i in range(x.ndim)])
    with jax.enable_x64(True):
        (loss, _), expected = gradients(objective, objective.counts(jnp.asarray(batch["mask"])), batch)
        (wide_loss, _), got = gradients(objective, objective.counts(jnp.asarray(wider["mask"])), wider)
    np.testing.assert_allclose(wide_loss, loss, rtol=1e-12)
    for key, gradient in expected.items():
        np.testing.assert_allclose(got[key][:, :6], gradient, rtol=1e-10, atol=1e-14)
        assert not np.asarray(got[key])[:, 6:].any()


def test_counts_depend_on_the_mask_alone():
    """Answers of 3, 1 and 0 tokens; a correction that weighs everything 0 leaves the count as it is."""
    mask = jnp.asarray([[True, True, True], [False, True, False], [False] * 3])
    assert float(make("grpo").counts(mask)["policy"]) == 2
    assert float(make("dapo").counts(mask)["policy"]) == 4
    ppo = make("ppo", aggregation="sequence_mean_token_mean", kl_coef=0.1, entropy_coef=0.1)
    assert {k: float(v) for k, v in ppo.counts(mask).items()} == {"policy": 2, "kl": 2, "entropy": 2, "value": 4}
    zeros = jnp.zeros((3, 3))
    terms = make("dapo", correction="icepop").terms(
        logprobs=zeros, old_logprobs=zeros, sampler_logprobs=zeros + 3, advantages=jnp.ones(3), mask=mask
    )
    assert [float(x) for x in terms["policy"]] == [0, 4]
