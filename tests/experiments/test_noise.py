"""The doses of the positive control: the measure of the mismatch, and the noise read off its measurements."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.routing_replay import noise, sweep
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.rollout.rollout import Routes
from tests.reference import tiny_training as tiny


def test_experts_routers_and_tokens_that_differ_by_hand():
    """Two layers, top-2: at token 0 of row 1 half of both layers' experts, at token 1 all of one layer's."""
    scored = np.full((2, tiny.ROWS, tiny.TIME, 2), 255, np.uint8)
    scored[:, 1, :4] = [0, 1]
    sampled = scored.copy()
    sampled[:, 1, 0] = [1, 2]
    sampled[0, 1, 1] = [2, 3]
    sampled[:, 1, 3] = 255  # never fed: no record, not counted
    records = Routes(Routing(jnp.asarray(sampled)), Routing(jnp.asarray(scored)))
    batch = dataclasses.replace(tiny.draw_batch(), routes=records)
    found = noise.measured(batch)
    assert float(found["experts"]) == pytest.approx((0.5 + 0.5 + 1) / 6)
    assert float(found["routers"]) == pytest.approx(3 / 6)
    assert float(found["tokens"]) == pytest.approx(2 / 3)
    gap = np.asarray(batch.old_logprobs - batch.sampler_logprobs)[np.asarray(batch.loss_mask)]
    assert float(found["mean gap"]) == pytest.approx(np.abs(gap).mean(), rel=1e-5)
    assert float(found["k3"]) == pytest.approx((np.exp(gap) - 1 - gap).mean(), rel=1e-5)


def test_a_dose_is_interpolated_on_logarithmic_axes():
    """Shares that grow as the square root of the noise: 3 % lies at 9 times the noise of 1 %."""
    levels = [0.01, 0.04, 0.25]
    assert noise.noise_of(0.03, levels, [0.01, 0.02, 0.05]) == pytest.approx(0.09)
    assert np.isnan(noise.noise_of(0.1, levels, [0.01, 0.02, 0.05]))


def test_the_control_has_every_dose_and_remedy():
    arms = {}
    for run in sweep.get_sweep("control").runs:
        arms.setdefault((run["updates.minibatches"], run["rollout.router_noise"]), set()).add(run["arm"])
    remedies = {"GRPO", "GRPO+R2", "GRPO+R3", "GRPO+TIS"}
    doses = (0.0, 0.014, 0.054, 0.21)
    assert arms == {(n, dose): remedies for n in (1, 4) for dose in doses}
