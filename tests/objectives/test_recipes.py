"""Every recipe: golden value, loops from the papers, closed-form gradients, finite differences, jit and no-jit."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.objectives.advantages import Gae
from jaxrl_llm.objectives.aggregation import Constant, TokenMean
from jaxrl_llm.objectives.corrections import Truncated
from jaxrl_llm.objectives.ratios import NoRatio, SamplerRatio, SequenceProduct, SequenceRatio
from jaxrl_llm.objectives.surrogates import GeometricMean
from jaxrl_llm.objectives.value import ValueLoss
from jaxrl_llm.objectives.vespo import Vespo
from tests.reference.answers import corrected, make, random_batch
from tests.reference.gradient_formulas import GRADIENTS
from tests.reference.objective_loops import GOLDEN, GOLDEN_BATCH, RECIPES

NAMES = objectives.names("rollouts")
# Defaults at which no token lies on a bound.
GOLDEN_SETTINGS = {
    "dr_grpo": {"max_length": 4},
    "sat": {"tail": 0.25},
    "dppo": {"divergence_low": 0.15, "divergence_high": 0.15},
    "clip_cov": {"cov_low": -0.4},
}


def answers_of(batch, new=None):
    """The same batch as the loops want it: answers without padding."""
    new = batch["logprobs"] if new is None else new
    shift = np.abs(batch["router_logprobs"] - batch["old_router_logprobs"]).mean((0, 3))
    gamma = np.maximum(np.exp(-shift), 0.8)
    out = []
    for i, valid in enumerate(batch["mask"]):
        if valid.any():
            fields = {"new": new, "frozen": batch["logprobs"], "old": batch["old_logprobs"], "gamma": gamma}
            fields["age"] = batch["age"]
            out.append({key: x[i][valid].tolist() for key, x in fields.items()})
            out[-1]["advantage"] = [float(batch["advantages"][i])] * int(valid.sum())
    return out


def detaches(name):
    """Whether the paper's loop keeps a factor out of the gradient: the value's own difference is then another one."""
    batch = random_batch(seed=2)
    moved = batch["logprobs"] + 1e-3 * np.random.default_rng(0).normal(size=batch["logprobs"].shape)
    kept, along = answers_of(batch, moved), answers_of({**batch, "logprobs": moved})
    return not math.isclose(RECIPES[name](kept), RECIPES[name](along), rel_tol=1e-12)


def policy_loss(objective, logprobs, batch):
    """The policy term alone: ppo's value arrays have nothing to do with it."""
    values = {name: jnp.zeros_like(logprobs) for name in ("values", "old_values", "returns")}
    total, count = objective.terms(**{**batch, **values, "logprobs": logprobs})["policy"]
    return total / jnp.maximum(count, 1)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradient(objective, logprobs, batch):
    return jax.value_and_grad(lambda x: policy_loss(objective, x, batch))(logprobs)


def loss_and_gradient(name, batch):
    with jax.enable_x64(True):
        logprobs = jnp.asarray(batch["logprobs"], jnp.float64)
        loss, gradient = value_and_gradient(make(name), logprobs, {k: x for k, x in batch.items() if k != "logprobs"})
    return float(loss), np.asarray(gradient)


@pytest.mark.parametrize("name", NAMES)
def test_golden_value(name):
    names = {"logprobs": "new", "old_logprobs": "old"}
    arrays = {key: jnp.log(jnp.asarray(GOLDEN_BATCH[short])) for key, short in names.items()}
    shift = jnp.asarray(GOLDEN_BATCH["router_shift"])[None, :, :, None]
    batch = {
        **arrays,
        "sampler_logprobs": arrays["old_logprobs"],
        "age": jnp.asarray(GOLDEN_BATCH["age"], jnp.float32),
        "advantages": jnp.asarray(GOLDEN_BATCH["advantages"]),
        "mask": jnp.asarray(GOLDEN_BATCH["mask"]),
        "router_logprobs": -shift,
        "old_router_logprobs": jnp.zeros_like(shift),
    }
    objective = make(name, **GOLDEN_SETTINGS.get(name, {}))
    expected, derivation = GOLDEN[name]
    got, _ = value_and_gradient(objective, batch.pop("logprobs"), batch)
    np.testing.assert_allclose(got, expected, rtol=2e-6, err_msg=f"derivation: {derivation}")


def test_every_recipe_has_a_golden_value_and_a_loop():
    assert set(NAMES) == set(RECIPES) >= set(GRADIENTS)


def test_which_recipes_detach_a_factor():
    assert {"gspo_token", "cispo", "vespo", "sat"} <= {name for name in NAMES if detaches(name)}
    assert not detaches("grpo")


@pytest.mark.parametrize("spread", [0.3, 2.0], ids=["near", "far"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_loops_of_the_paper(name, spread):
    batch = random_batch(spread=spread)
    loss, gradient = loss_and_gradient(name, batch)
    np.testing.assert_allclose(loss, -RECIPES[name](answers_of(batch)), rtol=1e-10)
    if name not in GRADIENTS:
        return  # the finite differences below are its check
    expected = np.zeros_like(batch["logprobs"])
    rows = np.flatnonzero(batch["mask"].any(1))
    for i, row in zip(rows, GRADIENTS[name](answers_of(batch)), strict=True):
        expected[i, batch["mask"][i]] = [-g for g in row]
    np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_equals_finite_differences(name):
    """Detached factors stay frozen at the base point; no token lies within the step of a kink (seeded)."""
    batch = random_batch(seed=1)
    _, gradient = loss_and_gradient(name, batch)
    step = 1e-6
    for i, t in zip(*np.nonzero(batch["mask"]), strict=True):
        sides = []
        for sign in (1, -1):
            moved = batch["logprobs"].copy()
            moved[i, t] += sign * step
            sides.append(-RECIPES[name](answers_of(batch, moved)))
        np.testing.assert_allclose(gradient[i, t], (sides[0] - sides[1]) / (2 * step), rtol=1e-5, atol=1e-9)
    assert not gradient[~batch["mask"]].any()


@pytest.mark.slow  # the examples of the documentation, which are quick tests, run without jit too
@pytest.mark.parametrize("name", NAMES)
def test_jit_and_no_jit_agree(name):
    """Everything switched on at once; the objective itself is a static argument."""
    objective = make(name, kl_coef=0.1, kl_estimator="k3_unbiased", entropy_coef=0.01, **corrected(name, "tis"))
    batch = {key: jnp.asarray(x) for key, x in random_batch().items()}
    old = batch["old_logprobs"]
    batch |= {"ref_logprobs": old - 0.1, "sampler_logprobs": old + 0.05, "entropy": -old}
    batch |= {"values": old, "old_values": old + 0.1, "returns": old - 0.4}

    def evaluate(objective, batch):
        return objective(**batch)

    with jax.disable_jit():
        plain = jax.value_and_grad(lambda x: evaluate(objective, {**batch, "logprobs": x}), has_aux=True)(
            batch["logprobs"]
        )
    jitted = jax.jit(
        lambda objective, x: jax.value_and_grad(lambda y: evaluate(objective, {**batch, "logprobs": y}), has_aux=True)(
            x
        ),
        static_argnums=0,
    )(objective, batch["logprobs"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, jitted)
    assert math.isfinite(float(jitted[0][0]))


def test_needs_names_what_is_read():
    assert make("grpo").needs == frozenset()
    assert make("grpo", kl_coef=0.1).needs == {"ref_logprobs"}
    assert make("reinforce_pp", reward_kl_coef=0.1).needs == {
        "ref_logprobs",
        "old_logprobs",
    }  # no first forward is pi_old
    assert make("grpo", entropy_coef=0.1).needs == {"entropy"}
    assert make("grpo", correction="icepop").needs == {"sampler_logprobs"}
    assert make("ppo").needs == {"values", "old_values", "returns"}
    assert "ref_logprobs" in make("ppo", reward_kl_coef=0.02).needs
    assert make("rspo").needs == {"router_logprobs", "old_router_logprobs"}
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        make("grpo", kl_coef=0.1)(**random_batch())


def test_an_objective_is_a_value():
    assert make("gspo", clip_low=1e-3) == make("gspo", clip_low=1e-3)
    assert hash(make("gspo", clip_low=1e-3)) == hash(make("gspo", clip_low=1e-3))
    assert make("gspo", clip_low=1e-3) != make("gspo")


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_what_make_uses(name):
    known = objectives.hyperparameters(name)
    if "max_length" in known:
        assert known["max_length"] is None
        known["max_length"] = 8
    assert objectives.make(name, **known) == make(name)


def test_aggregation_can_be_chosen():
    assert objectives.make("grpo", aggregation="token_mean").aggregation == TokenMean()
    assert objectives.hyperparameters("grpo", "constant")["max_length"] is None
    chosen = objectives.make("gspo", aggregation="constant", max_length=16)
    assert chosen.aggregation == Constant(16)


@pytest.mark.parametrize(
    ("name", "hyperparameters", "message"),
    [
        ("grp", {}, r"did you mean 'grpo'.*reinforce, rloo"),
        ("grpo", {"clip_lo": 0.2}, r"no hyper-parameter 'clip_lo' \(did you mean 'clip_low'\?\)"),
        ("sapo", {"dual_clip": 3.0}, r"'dual_clip'; it belongs to rloo, ppo, grpo"),
        ("grpo", {"tau_pos": 1.0}, "'tau_pos'; it belongs to sapo"),
        ("grpo", {"clip_low": 0.0}, r"clip_low=0.0 is out of range; give clip_low above 0"),
        ("grpo", {"clip_high": float("nan")}, "clip_high=nan is not a number"),
        ("grpo", {"dual_clip": 1.0}, "dual_clip=1.0 is out of range; give dual_clip above 1"),
        ("grpo", {"kl_coef": -0.1}, "kl_coef=-0.1 is out of range"),
        ("grpo", {"kl_coef": 0.1, "kl_estimator": "k1"}, "zero expected gradient.*reward_kl_coef"),
        ("grpo", {"kl_estimator": "k4"}, "kl_estimator='k4' is unknown.*k2, k3, k3_unbiased"),
        ("grpo", {"correction": "tiss"}, "did you mean 'tis'"),
        ("grpo", {"correction_cap": 2.0}, "without a correction"),
        ("grpo", {"correction": "icepop", "correction_cap": 0.5}, "correction_cap=0.5 is out of range"),
        ("grpo", {"aggregation": "mean"}, "aggregation='mean' is unknown"),
        ("grpo", {"std": "samples"}, "did you mean 'sample'"),
        ("grpo", {"baseline": "none"}, 'set std="none"'),
        ("dr_grpo", {}, "max_length=None: give the longest answer"),
        ("ppo", {"lam": 1.5}, "lam=1.5 is out of range; give lam between 0 and 1"),
        ("ppo", {"value_clip": -1.0}, "value_clip=-1.0 is out of range"),
        ("sapo", {"tau_neg": 0.0}, "tau_neg=0.0 is out of range"),
        ("cispo", {"cap": -5.0}, "cap=-5.0 is out of range"),
        ("gmpo", {"log_clip": 0.0}, "log_clip=0.0 is out of range"),
        ("sat", {"tail": 1.5}, r"tail=1.5 is out of range; give tail between 0.0 and 1.0"),
        ("dppo", {"divergence": "tvd"}, r"divergence='tvd' is unknown \(did you mean 'tv'\?\)"),
        ("dppo", {"divergence_low": 0.0}, "divergence_low=0.0 is out of range"),
        ("dppo", {"correction": "tis"}, "correction would count the sampler's mismatch twice"),
        ("grpo", {"clip_low": "low"}, "clip_low='low' must be a number, for example 1e-3"),
        ("grpo", {"std_eps": None}, "std_eps=None must be a number"),
        ("rspo", {"gamma_min": 1.1}, "gamma_min=1.1 is out of range; give gamma_min above 0 and at most 1"),
    ],
)
def test_bad_choices_are_refused_with_the_remedy(name, hyperparameters, message):
    with pytest.raises(ValueError, match=message):
        objectives.make(name, **hyperparameters)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"ratio": NoRatio()}, "Clip with NoRatio: .*unit token or sequence.* unit none; use TokenRatio"),
        (
            {"surrogate": GeometricMean(), "ratio": SequenceRatio()},
            "GeometricMean with SequenceRatio: .*unit token.* unit sequence; use TokenRatio",
        ),
        ({"surrogate": Vespo()}, "Vespo with TokenRatio: .*use SequenceProduct"),
        ({"ratio": SequenceProduct()}, "Clip with SequenceProduct: .* unit product; use TokenRatio"),
        ({"advantage": Gae()}, "Gae needs a value function; set value"),
        ({"value": ValueLoss()}, "ValueLoss needs returns, which GroupAdvantage does not make; use Gae"),
        (
            {"ratio": SamplerRatio(), "correction": Truncated()},
            "correction would count the sampler's mismatch twice.*set correction=None",
        ),
        ({"aggregation": Constant()}, "max_length=None"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts, message):
    grpo = objectives.make("grpo")
    fields = {name: getattr(grpo, name) for name in ("advantage", "ratio", "surrogate", "aggregation")}
    with pytest.raises(ValueError, match=message):
        objectives.Objective(**{**fields, **parts})
