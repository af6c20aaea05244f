"""The row of a step: what is summed over its updates, what is the first one's alone, and what the host knows."""

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.training.pending import Pending


def mean(total, count):
    return M.Mean(jnp.float32(total), jnp.float32(count))


def update(loss, tokens, gap, flips):
    """flips: of two layers with 4 and 2 compared experts."""
    by_layer = M.Mean(jnp.array(flips), jnp.array([4.0, 2.0]))
    return {
        "loss/policy": mean(loss, tokens),
        "grad/max": M.Maximum(jnp.float32(loss)),
        "check/current_old_mean": mean(gap, 1),
        "routing/flips_old_current": mean(sum(flips), 6),
        "routing/flips_old_current_by_layer": by_layer,
    }


def test_a_row_by_hand():
    """Means over the tokens of both updates, 12 / 8 and not 4 / 2 + 8 / 6; of checks the first update's."""
    updates = [update(4.0, 2, 0.25, [1.0, 0.0]), update(8.0, 6, 0.75, [2.0, 1.0])]
    scored = {"check/old_sampler_mean": mean(1, 2), "kl/ref": mean(3, 4)}
    row = Pending(3, {"time/update_s": 2.0, "kl/ref": 7.0}, scored, updates, [], {}).row()
    expected = {
        "loss/policy": 1.5,
        "grad/max": 8.0,
        "check/current_old_mean": 0.25,
        "check/old_sampler_mean": 0.5,
        "routing/flips_old_current": 1 / 3,
        "routing/flips_old_current_by_layer": [3 / 8, 1 / 4],
        "routing/flips_old_current_by_update": [[1 / 4, 0.0], [2 / 4, 1 / 2]],
        "routing/flips_numeric": 1 / 6,
        "time/update_s": 2.0,
        "kl/ref": 7.0,
    }
    assert row.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(row[name], value, rtol=1e-6, err_msg=name)
