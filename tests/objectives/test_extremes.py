"""No NaN and no infinity in value, gradient or metrics: any mask, any length, log-ratios up to +-50, empty rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm import objectives
from jaxrl_llm.ground.metrics import finalize
from jaxrl_llm.objectives.ratios import token_log_ratio
from tests.reference.answers import corrected, make
from tests.reference.slowly import first_quick

SHAPE = (3, 4)
SIZE = 12
FOUNDING = "ppo", "grpo", "dapo", "gspo", "sapo"
FOUNDING_FIRST = [*FOUNDING, *(name for name in objectives.names("rollouts") if name not in FOUNDING)]


@functools.partial(jax.jit, static_argnums=0)
def evaluate(objective, batch):
    def loss(differentiated):
        return objective(**{**batch, **differentiated})

    names = ("logprobs", "values", "entropy")
    return jax.value_and_grad(loss, has_aux=True)({name: batch[name] for name in names})


def numbers(low, high):
    return st.lists(st.floats(low, high, width=32), min_size=SIZE, max_size=SIZE).map(
        lambda xs: np.asarray(xs, np.float32).reshape(SHAPE)
    )


# The mean over an answer divides by its advantage, which is 0 or no smaller than rewards can make it.
ADVANTAGES = numbers(-10, 10).map(lambda x: np.where(np.abs(x) < 1e-6, np.float32(0), x))
MASKS = st.lists(st.booleans(), min_size=SIZE, max_size=SIZE).map(lambda xs: np.asarray(xs).reshape(SHAPE))


def batch_of(log_ratio, old, advantages, mask, garbage=0.0):
    """`garbage` stands wherever the mask is False, in every array."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(4, *SHAPE)).astype(np.float32)
    arrays = {
        "logprobs": old + log_ratio,
        "old_logprobs": old,
        "ref_logprobs": old - log_ratio,
        "sampler_logprobs": old + log_ratio[::-1],
        "values": noise[0],
        "old_values": noise[1],
        "returns": noise[2],
        "entropy": np.abs(noise[3]),
        "age": np.arange(SIZE, dtype=np.float32).reshape(SHAPE),
        "advantages": advantages,
    }
    arrays = {name: np.where(mask, x, np.float32(garbage)) for name, x in arrays.items()}
    router = np.where(mask[None, :, :, None], np.abs(log_ratio)[None, :, :, None], np.float32(garbage))
    return {
        **{name: jnp.asarray(x) for name, x in arrays.items()},
        "mask": jnp.asarray(mask),
        "router_logprobs": jnp.asarray(-router),
        "old_router_logprobs": jnp.asarray(np.zeros_like(router)),
    }


def full(name, correction="icepop", estimator="k3_unbiased"):
    extra = {"dual_clip": 3.0} if "dual_clip" in objectives.hyperparameters(name) else {}
    return make(name, kl_coef=0.1, kl_estimator=estimator, entropy_coef=0.01, **corrected(name, correction), **extra)


def assert_finite(result):
    (loss, metrics), gradient = result
    assert np.isfinite(loss)
    assert all(np.isfinite(x).all() for x in gradient.values())
    inside = {name: x for name, x in metrics.items() if not name.endswith("max")}  # the maximum of nothing is -inf
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(inside))
    assert not any(np.isinf(x) for x in finalize(metrics).values())


@pytest.mark.parametrize("name", first_quick(3, FOUNDING_FIRST))
@given(numbers(-50, 50), numbers(-50, 0), ADVANTAGES, MASKS)
def test_everything_stays_finite(name, log_ratio, old, advantages, mask):
    assert_finite(evaluate(full(name), batch_of(log_ratio, old, advantages, mask)))


@pytest.mark.parametrize("estimator", [pytest.param("k2", marks=pytest.mark.slow), "k3"])
@pytest.mark.parametrize("correction", ["tis", "sequence_mask"])
@given(numbers(-50, 50), numbers(-50, 0), numbers(-10, 10), MASKS)
def test_other_estimators_and_corrections_stay_finite(correction, estimator, log_ratio, old, advantages, mask):
    objective = full("grpo", correction, estimator)
    assert_finite(evaluate(objective, batch_of(log_ratio, old, advantages, mask)))


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -1e30])
@pytest.mark.parametrize("name", objectives.names("rollouts"))
def test_what_is_masked_is_never_read(name, garbage):
    """Bitwise the same value, gradient and metrics whatever stands on padding, in every array."""
    rng = np.random.default_rng(0)
    log_ratio, old, advantages = rng.normal(size=(3, *SHAPE)).astype(np.float32)
    mask = np.asarray([[True] * 4, [False, True, True, False], [False] * 4])
    clean, dirty = (evaluate(full(name), batch_of(log_ratio, old, advantages, mask, fill)) for fill in (0.0, garbage))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


@pytest.mark.parametrize("name", objectives.names("rollouts"))
def test_nothing_unmasked_gives_zero(name):
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(3, *SHAPE)).astype(np.float32)
    (loss, _), gradient = evaluate(full(name), batch_of(*arrays, np.zeros(SHAPE, bool)))
    assert loss == 0
    assert not any(np.asarray(x).any() for x in gradient.values())


@pytest.mark.parametrize("name", first_quick(3, FOUNDING_FIRST))
def test_a_fully_masked_row_is_a_row_that_is_not_there(name):
    rng = np.random.default_rng(0)
    log_ratio, old, advantages = 0.3 * rng.normal(size=(3, *SHAPE)).astype(np.float32)
    mask = np.asarray([[True, True, True, False], [True] * 4, [False] * 4])
    batch = batch_of(log_ratio, old, advantages, mask)
    short = {key: x[:, :2] if key.endswith("router_logprobs") else x[:2] for key, x in batch.items()}
    (whole, _), (part, _) = (evaluate(full(name), x)[0] for x in (batch, short))
    np.testing.assert_allclose(whole, part, rtol=1e-6)


def test_beyond_twenty_the_gradient_is_zero():
    """A token whose log-ratio left +-20 keeps its bounded value and gives no gradient; on the bound it still does."""
    batch = objectives.Batch.of(
        logprobs=jnp.asarray([[19.0, 20.0, 21.0, -21.0]]),
        old_logprobs=jnp.zeros((1, 4)),
        advantages=jnp.ones(1),
        mask=jnp.ones((1, 4), bool),
    )
    np.testing.assert_array_equal(batch.log_ratio, [[19, 20, 20, -20]])
    gradient = jax.grad(lambda x: token_log_ratio(x, batch.old_logprobs, batch.mask).sum())(batch.logprobs)
    np.testing.assert_array_equal(gradient, [[1, 1, 0, 0]])
