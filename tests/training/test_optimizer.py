"""The optimizer against AdamW written out in numpy, the two masks, and parameters in bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.training.optimizer import decayed, make_optimizer, make_schedule, rate_doubts
from jaxrl_llm.training.state import Trained
from tests.reference import tiny_training as tiny

TWOS = np.full((2, 2), 2, np.float32)
PARAMS = {
    "ends": {"embedding": TWOS, "head": TWOS, "norm": {"scale": TWOS[0]}},
    "moe": {"mlp": {"router": TWOS}},
    "value_head": {"kernel": TWOS[0], "bias": TWOS[0, 0]},
}


def config(**changes):
    return dataclasses.replace(tiny.OPTIMIZER, **({"clip_norm": 0.0} | changes))


def changes_of(gradients, config, total=10):
    """The parameter changes of consecutive steps, as flat dicts of numpy arrays; each gradient is a constant."""
    optimizer = make_optimizer(config, total)

    def step(carry, gradient):
        params, state = carry
        change, state = optimizer.update(jax.tree.map(lambda p: jnp.full(p.shape, gradient), params), state, params)
        return (optax.apply_updates(params, change), state), change

    run = jax.jit(lambda params, gradients: jax.lax.scan(step, (params, optimizer.init(params)), gradients)[1])
    change = jax.tree_util.tree_leaves_with_path(jax.device_get(run(PARAMS, np.array(gradients, np.float32))))
    return [{jax.tree_util.keystr(k): v[i] for k, v in change} for i in range(len(gradients))]


@pytest.mark.parametrize(
    ("rates", "warned"), [({"a": 1e-3, "b": 0.1}, False), ({"a": 1e-3, "b": 0.11}, True), ({"a": 1.0}, True)]
)
def test_a_rate_that_is_too_high_is_named(rates, warned):
    assert list(rate_doubts(rates)) == ["learning_rate"] * warned
    assert "a=0.001" not in rate_doubts(rates).get("learning_rate", "")


@pytest.mark.parametrize("rate", [1.01, 1e9])
def test_a_rate_that_leaves_nothing_of_the_model_is_refused(rate):
    with pytest.raises(
        ValueError, match=r"critic\.learning_rate=.*AdamW moves every parameter.*set it to 1e-3 or less"
    ):
        rate_doubts({"optimizer.learning_rate": 1e-3, "critic.learning_rate": rate})


def test_adamw_by_hand():
    """m and v with bias correction, weight decay 0.1 on the head only of these two leaves."""
    found = changes_of([0.5, -1.0], config(weight_decay=0.1))
    m, v, p = 0.0, 0.0, {"head": 2.0, "embedding": 2.0}
    for t, g in enumerate([0.5, -1.0], start=1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        adam = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3)
        for name, decay in (("head", 0.1), ("embedding", 0.0)):
            change = -0.01 * (adam + decay * p[name])
            np.testing.assert_allclose(found[t - 1][f"['ends']['{name}']"], change, rtol=1e-5)
            p[name] += change


def test_decay_spares_norms_embeddings_biases_and_the_value_head():
    spared = {jax.tree_util.keystr(k) for k, v in jax.tree_util.tree_leaves_with_path(decayed(PARAMS)) if not v}
    assert spared == {
        "['ends']['embedding']",
        "['ends']['norm']['scale']",
        "['value_head']['bias']",
        "['value_head']['kernel']",
    }


def test_the_masks_find_the_leaves_of_a_real_model():
    params = jax.eval_shape(tiny.make_model().init, jax.random.key(0))
    on = {jax.tree_util.keystr(k) for k, v in jax.tree_util.tree_leaves_with_path(decayed(params)) if v}
    assert not any("norm" in name or "embedding" in name for name in on)
    matrices = {k for k, v in jax.tree_util.tree_leaves_with_path(params) if v.ndim >= 2 and "norm" not in str(k)}
    assert len(on) == len(matrices) - 1  # all but the embedding
    assert sum("router" in name for name in on) == 1


@pytest.mark.parametrize("factor", [0.0, 0.25])
def test_the_router_has_a_rate_of_its_own(factor):
    """0 freezes it exactly, weight decay and momentum included; the others do not notice."""
    plain = changes_of([0.5, -1.0], config(weight_decay=0.1))
    slowed = changes_of([0.5, -1.0], config(weight_decay=0.1, router_factor=factor))
    name = "['moe']['mlp']['router']"
    np.testing.assert_allclose(slowed[0][name], factor * plain[0][name], rtol=1e-6)
    if factor == 0:
        assert not slowed[0][name].any()
        assert not slowed[1][name].any()
    for other in plain[0].keys() - {name}:
        np.testing.assert_array_equal(slowed[1][other], plain[1][other])


def test_a_critic_has_its_own_rate_and_no_factor_for_its_router():
    optimizer = make_optimizer(config(router_factor=0.0), 10, critic_learning_rate=0.04)
    given = Trained(PARAMS, PARAMS)
    found, _ = jax.jit(optimizer.update)(given, optimizer.init(given), given)
    for part, router, head in ((found.policy, 0.0, -0.01), (found.critic, -0.04, -0.04)):
        np.testing.assert_allclose(part["moe"]["mlp"]["router"], router, rtol=2e-3)
        np.testing.assert_allclose(part["ends"]["head"], head, rtol=2e-3)


def test_the_global_norm_is_clipped():
    """One step of Adam forgets the scale of its gradient, the second moment of two steps does not."""
    count = sum(np.size(p) for p in jax.tree.leaves(PARAMS))
    found = changes_of([10.0, 0.1], config(clip_norm=1.0))
    clipped = [1 / np.sqrt(count), 0.1 if 0.1 * np.sqrt(count) <= 1 else 1 / np.sqrt(count)]
    expected = changes_of(clipped, config())
    np.testing.assert_allclose(found[1]["['ends']['head']"], expected[1]["['ends']['head']"], rtol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        ("constant", 0, [1, 1, 1, 1, 1]),
        ("constant", 2, [0, 0.5, 1, 1, 1]),
        ("linear", 0, [1, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", 0, [1, 0.868198, 0.55, 0.231802, 0.1]),
        ("linear", 1, [0, 1, 0.7, 0.4, 0.1]),
    ],
)
def test_schedules(schedule, warmup, rates):
    """Rate of steps 0..4 of 4, in peaks; eps 0 and b1 = b2 = 0 make a step of Adam the sign of its gradient."""
    configured = config(schedule=schedule, warmup_steps=warmup, b1=0.0, b2=0.0, eps=1e-12)
    logged = [float(make_schedule(configured, 4)(step)) for step in range(5)]
    np.testing.assert_allclose(np.divide(logged, 0.01), rates, atol=1e-6)  # what the trainer logs is what acts
    found = changes_of([1.0] * 5, configured, total=4)
    np.testing.assert_allclose([-step["['ends']['head']"][0, 0] / 0.01 for step in found], rates, atol=1e-6)


def test_equal_configs_share_one_optimizer():
    """It is a static argument of the compiled step: another object would compile it again."""
    linear = config(schedule="linear")
    assert make_optimizer(linear, 10) is make_optimizer(linear, 10)
    assert make_optimizer(linear, 10) is not make_optimizer(linear, 20)
    assert make_optimizer(config(), 10) is make_optimizer(config(), 20)


RATE, STEPS = 1e-6, 50
DRAWN = np.random.default_rng(0)
NARROW = {
    "moe": {"mlp": {"router": jnp.asarray(DRAWN.normal(0, 0.02, (64, 64)), jnp.bfloat16)}},
    "value_head": {"kernel": DRAWN.normal(0, 0.02, 64).astype(np.float32)},
}
SIGNS = jax.tree.map(lambda p: np.sign(DRAWN.normal(size=p.shape)).astype(p.dtype), NARROW)


def trained(optimizer, params=NARROW, gradients=SIGNS, steps=STEPS):
    """(parameters, state of the optimizer) after steps with the same gradients."""

    def step(_, carry):
        params, state = carry
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state

    run = jax.jit(lambda params: jax.lax.fori_loop(0, steps, step, (params, optimizer.init(params))))
    return run(jax.tree.map(jnp.asarray, params))


def test_a_bfloat16_parameter_moves_by_what_its_updates_sum_to():
    """50 steps of 1e-6 in one direction are 5e-5: half a unit in the last place is 3.1e-5 for weights of 2^-7 to 2^-6,
    and 6.1e-5 from there on, where the sum is not seen yet."""
    optimizer = make_optimizer(config(learning_rate=RATE, eps=1e-8), STEPS)
    params, state = trained(optimizer)
    start, end = (np.asarray(tree["moe"]["mlp"]["router"]) for tree in (NARROW, params))
    assert end.dtype == jnp.bfloat16
    edge = np.abs(start) == 2.0**-6  # whose neighbours are nearer on one side
    np.testing.assert_array_equal((start != end)[~edge], np.abs(start.astype(np.float32))[~edge] < 2.0**-6)
    assert {x.dtype.name for x in jax.tree.leaves(state) if x.ndim} == {"float32"}


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0])
def test_masters_are_what_float32_parameters_would_be(factor):
    """Bit for bit, with decay, clipping and a factor of the router; a parameter is the rounding of its master."""
    optimizer = make_optimizer(config(weight_decay=0.1, clip_norm=1.0, router_factor=factor, schedule="cosine"), STEPS)
    params, state = trained(optimizer)
    wide = jax.tree.map(lambda x: x.astype(np.float32), (NARROW, SIGNS))
    expected, _ = trained(optimizer, *wide)
    name = ("moe", "mlp", "router")
    master, whole, rounded = (tree[name[0]][name[1]][name[2]] for tree in (state.masters, expected, params))
    np.testing.assert_array_equal(master, whole)
    np.testing.assert_array_equal(rounded, whole.astype(jnp.bfloat16))
    assert bool((rounded == NARROW["moe"]["mlp"]["router"]).all()) is (factor == 0)
    np.testing.assert_array_equal(params["value_head"]["kernel"], expected["value_head"]["kernel"])
    assert len(jax.tree.leaves(state.masters)) == 1  # a float32 parameter is its own


def test_without_masters_an_update_below_the_rounding_is_lost():
    """A weight of at least 2^-11 is half a unit of 1.9e-6 or more from the next rounding, beyond a step of 1e-6."""
    optimizer = make_optimizer(config(learning_rate=RATE, eps=1e-8), STEPS, masters=False)
    params, state = trained(optimizer, steps=1)
    start, end = (np.asarray(tree["moe"]["mlp"]["router"]) for tree in (NARROW, params))
    assert not (start != end)[np.abs(start.astype(np.float32)) > 2.0**-11].any()
    assert 0 < (start != end).mean() < 0.05
    assert {x.dtype.name for x in jax.tree.leaves(state) if x.ndim} == {"float32"}
    assert len([x for x in jax.tree.leaves(state) if x.ndim]) == 4  # two moments of each


def test_float32_parameters_have_no_masters_and_the_same_numbers():
    wide = jax.tree.map(lambda x: x.astype(np.float32), (NARROW, SIGNS))
    (with_, state), (without, plain) = (
        trained(make_optimizer(config(weight_decay=0.1), STEPS, masters=masters), *wide) for masters in (True, False)
    )
    jax.tree.map(np.testing.assert_array_equal, (with_, state), (without, plain))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "step"}, "optimizer.schedule='step' is unknown; use one of constant, linear, cosine"),
        ({"learning_rate": -1e-3}, r"optimizer\.learning_rate=-0\.001"),
        ({"clip_norm": -1.0}, r"optimizer\.clip_norm=-1\.0"),
        ({"router_factor": -1.0}, r"optimizer\.router_factor"),
        ({"b2": 1.0}, r"optimizer\.b2=1\.0 is out of range; give optimizer\.b2 at least 0 and below 1"),
        ({"eps": 0.0}, r"optimizer\.eps=0\.0 is out of range; give optimizer\.eps above 0"),
    ],
)
def test_bad_values_name_their_field(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
