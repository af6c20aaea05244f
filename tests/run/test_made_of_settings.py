"""A run as its settings make it, without data and without a step: schedules, adapters and the base under them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.run import assembly, trainer
from jaxrl_llm.run.settings import validate
from jaxrl_llm.training.collect import Draw
from jaxrl_llm.training.state import Trained, TrainState
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_run
from tests.reference import tiny_training as tiny

# Two rollouts of 2 x 3 updates: 12 optimizer steps, in which the rate falls in a line from its peak to a tenth of it.
SCHEDULE = {
    "steps": 2,
    "updates.minibatches": 2,
    "updates.epochs": 3,
    "optimizer.schedule": "linear",
    "optimizer.learning_rate": 0.1,
    "optimizer.final_fraction": 0.1,
    "optimizer.b1": 0.0,
    "optimizer.b2": 0.0,
    "optimizer.clip_norm": 0.0,
    "optimizer.weight_decay": 0.0,
    "log.diagnostics_every": 0,
}
FALLING = [0.1 * (1 - 0.9 * step / 12) for step in range(12)]


def built(folder, **changes):
    return assembly.build(validate(tiny_run.make_config(folder, **changes)), jax.devices()[:1])


def test_the_schedule_ends_with_the_last_update_of_the_last_rollout(tmp_path):
    """Without memory a step of Adam is the rate, against the sign of its gradient."""
    optimizer = built(tmp_path, **SCHEDULE).learner.optimizer
    params = {"head": jnp.ones((2, 2))}

    def step(state, _):
        changes, state = optimizer.update(params, state, params)
        return state, changes["head"][0, 0]

    found = jax.jit(lambda: jax.lax.scan(step, optimizer.init(params), length=12)[1])()
    np.testing.assert_allclose(found, np.negative(FALLING), rtol=1e-5)


class Still(Learner):
    def update(self, state, batch, layout, teacher=None):
        return state, {}


def test_the_logged_rate_is_that_of_the_last_update_of_the_step(tmp_path):
    run = built(tmp_path, **SCHEDULE)
    still = Still(**{field.name: getattr(run.learner, field.name) for field in dataclasses.fields(Learner)})
    state = TrainState(Trained({}), optax.EmptyState(), jnp.zeros((), jnp.int32))
    drawn = Draw(tiny.draw_batch(), [[tiny.layout_of()] * 2] * 3)
    for step, last in ((1, 5), (2, 11)):
        pending = trainer.learn(dataclasses.replace(run, learner=still), state, drawn, step, 0.0)[1]
        assert pending.host["optimizer/learning_rate"] == pytest.approx(FALLING[last])
        assert len(pending.updates) == 6


def test_adapters_are_scaled_by_alpha_over_the_rank(tmp_path):
    run = built(tmp_path, **{"lora.rank": 4, "lora.alpha": 6.0})
    assert jax.eval_shape(run.blank).scale == 1.5
    assert jax.eval_shape(built(tmp_path).blank).scale == 1.0


def test_a_base_is_known_by_every_bit_of_it():
    base = {"moe": {"mlp": {"up": jnp.arange(6.0).reshape(2, 3)}}, "ends": {"head": jnp.ones(3)}}
    state = TrainState(Trained({"a": jnp.zeros(2)}), None, jnp.zeros((), jnp.int32), base=base)
    digest = assembly.base_digest(state)
    assert digest == assembly.base_digest(state.replace(trained=Trained({"a": jnp.ones(2)})))
    others = {
        assembly.base_digest(state.replace(base=other))
        for other in (
            base | {"ends": {"head": jnp.array([1, 1, np.nextafter(np.float32(1), 2)])}},
            {"moe": {"mlp": {"up": base["moe"]["mlp"]["up"][::-1]}}, "ends": base["ends"]},
            {"moe": base["moe"]},
        )
    }
    assert len(others | {digest}) == 4
    assert assembly.base_digest(state.replace(base=None)) is None
    assembly.check_base(digest, {"base": digest})
    assembly.check_base(None, {})
    for own, saved in ((digest, {"base": others.pop()}), (digest, {}), (None, {"base": digest})):
        with pytest.raises(ValueError, match="is not the one that the checkpoint's adapters were trained on"):
            assembly.check_base(own, saved)
