"""What the heavy routing diagnostics say of routings and ratios written down by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.training.gaps import decompose, flipped_before, ratio_by_flip


def test_a_flip_counts_for_later_tokens_of_its_own_row():
    old = jnp.zeros((2, 2, 4, 2), jnp.uint8).at[..., 1].set(1)
    new = old.at[1, 0, 1].set(jnp.array([1, 0], jnp.uint8))  # the same set is no flip
    assert not flipped_before(Routing(old), Routing(new)).any()
    new = new.at[1, 0, 1].set(jnp.array([1, 2], jnp.uint8))
    assert flipped_before(Routing(old), Routing(new)).tolist() == [[False, False, True, True], [False] * 4]


def test_the_ratio_is_told_apart_by_flips():
    ratio = jnp.array([[1.0, 1.5, 2.0, 4.0], [0.5, 1.0, 1.0, 9.0]])
    flipped = jnp.array([[False, False, True, True], [False] * 4])
    mask = jnp.ones((2, 4), bool).at[1, 3].set(False)
    found = M.finalize(ratio_by_flip(jnp.log(ratio), flipped, mask))
    assert found["routing/flipped_tokens"] == pytest.approx(2 / 7)
    for name, values in (("flipped", [2.0, 4.0]), ("unflipped", [1.0, 1.5, 0.5, 1.0, 1.0])):
        got = [found[f"routing/ratio_{name}_{measure}"] for measure in ("mean", "var", "max")]
        np.testing.assert_allclose(got, [np.mean(values), np.var(values), max(values)], rtol=1e-5)
        assert found[f"routing/ratio_{name}_p99"] == pytest.approx(max(values), rel=0.06)


def test_tails_and_drift_are_of_the_whole_ratio():
    """log r = parameter + routing: 0.3 + 0, 0 - 0.8, 0.5 + 0.3 (which double only together), and a masked token."""
    held, current = jnp.array([[0.3, 0.0, 0.5, 9.0]]), jnp.array([[0.3, -0.8, 0.8, 9.0]])
    found = M.finalize(decompose(current, held, held, jnp.zeros((1, 4)), jnp.array([[True, True, True, False]])))
    above = {name: found[f"routing/{name}"] for name in ("log_ratio_above_0.2", "log_ratio_above_ln2")}
    assert above == pytest.approx({"log_ratio_above_0.2": 1.0, "log_ratio_above_ln2": 2 / 3})
    assert found["routing/part_above_ln2"] == pytest.approx(1 / 3)
    log_r = np.array([0.3, -0.8, 0.8])
    assert found["routing/kl_fresh"] == pytest.approx(np.mean(np.exp(log_r) - 1 - log_r), rel=1e-5)


def test_a_ratio_of_no_token_is_not_a_number():
    everywhere = jnp.ones((1, 2), bool)
    found = M.finalize(ratio_by_flip(jnp.zeros((1, 2)), everywhere, everywhere))
    assert found["routing/ratio_flipped_max"] == 1
    assert all(np.isnan(found[f"routing/ratio_unflipped_{one}"]) for one in ("mean", "var", "p99", "max"))
