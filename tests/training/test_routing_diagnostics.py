"""What the heavy routing diagnostics say of routings and ratios written down by hand."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.rollout.rollout import Rollout, Routes
from jaxrl_llm.training.experience import diagnose
from jaxrl_llm.training.gaps import decompose, flipped_before, flips, ratio_by_flip
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny


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


def test_flips_compare_the_choice_that_a_replay_overruled():
    """Expert 0 was replayed in place of 2: half of the experts of the first token differ. The second is padding."""
    used, chosen = (jnp.array([[[first, [255, 255]]]], jnp.uint8) for first in ([0, 1], [1, 2]))
    old = Routing(jnp.array([[[[1, 0], [0, 1]]]], jnp.uint8))
    found = M.finalize(flips("flips", old, Routing(used, chosen=chosen), jnp.ones((1, 2), jnp.int32)))
    assert found == {"flips": 0.5, "flips_by_layer": [0.5]}


def test_a_ratio_of_no_token_is_not_a_number():
    everywhere = jnp.ones((1, 2), bool)
    found = M.finalize(ratio_by_flip(jnp.zeros((1, 2)), everywhere, everywhere))
    assert found["routing/ratio_flipped_max"] == 1
    assert all(np.isnan(found[f"routing/ratio_unflipped_{one}"]) for one in ("mean", "var", "p99", "max"))


OLD, FRESH, MASK = (jnp.asarray(x)[None] for x in ([0, 1, 0, 0, 1], [1, 1, 0, 1, 0], [False, True, True, True, False]))
# log p of each token, by the policy and by the experts that it is given; first and last token are not read.
KNOWN = {
    ("old", "old"): [-9.0, -2.0, -2.0, -2.0, -9.0],
    ("old", "fresh"): [-1.0, -1.0, -2.0, -3.0, -5.0],
    ("current", "old"): [-3.0, -1.5, -2.0, -2.5, -7.0],
    ("current", "fresh"): [-7.0, -1.125, -1.875, -2.625, -1.0],
}


class Known(Learner):
    """Gives every pass the log-probs of `KNOWN`; without a record the router of the current policy chooses `FRESH`."""

    def score(self, policy, rollout, layouts, wanted, routing=None):
        experts = experts_in(FRESH if routing is None else routing.experts[0, ..., 0])
        given = "fresh" if np.array_equal(experts.experts[0, ..., 0], FRESH) else "old"
        return {"logprobs": jnp.array([KNOWN[policy.trained["name"], given]]), "routing": experts}


def experts_in(chosen):
    return Routing(jnp.asarray(chosen, jnp.uint8)[None, ..., None])


def test_the_parts_of_the_ratio_by_hand():
    """log r = (0.875, 0.125, -0.625) is 0.75 (1, 0, -1) around its mean. With the old experts the policies differ by
    the parameter part 0.5 (1, 0, -1); the rest is the routing part 0.25 (1, 0, -1) + 0.125, a third of log r. With the
    fresh experts first the routing part is (1, 0, -1), and the mean of both orders 0.625 (1, 0, -1), five sixths."""
    learner = Known(tiny.make_model(), objectives.make("grpo"), optax.sgd(1.0))
    batch = Rollout(
        tokens=jnp.zeros((1, 5), jnp.int32),
        segment_ids=jnp.ones((1, 5), jnp.int32),
        loss_mask=MASK,
        advantages=jnp.zeros((1, 5)),
        old_logprobs=jnp.array([KNOWN["old", "old"]]),
        routes=Routes(scored=experts_in(OLD)),
    )
    found = M.finalize(diagnose(learner, Policy({"name": "current"}), Policy({"name": "old"}), batch, []))
    expected = {
        "routing/share_of_variance": 1 / 3,
        "routing/share_of_variance_shapley": 5 / 6,
        "routing/log_ratio_var": 0.75**2 * 2 / 3,
        "routing/parameter_var": 0.5**2 * 2 / 3,
        "routing/routing_var": 0.25**2 * 2 / 3,
        "routing/part_p50": 0.125,  # of 0.375, 0.125 and 0.125
        "routing/part_p90": 0.125,
        "routing/part_above_0.2": 1 / 3,
        "routing/log_ratio_above_0.2": 2 / 3,
        "routing/kl_fresh": np.mean([np.exp(x) - 1 - x for x in (0.875, 0.125, -0.625)]),
        "routing/flips_fresh": 3 / 5,
        "routing/flipped_tokens": 1.0,  # the prompt's expert has changed
        "routing/ratio_flipped_mean": np.mean(np.exp([0.875, 0.125, -0.625])),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
