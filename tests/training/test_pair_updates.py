"""One update on pairs: micro-batches, packing, a shared prompt and devices change nothing of its gradient."""

import functools
from unittest.mock import Mock

import jax
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.metrics import finalize
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.training.layout import UpdateConfig, groups_of, lay_out
from jaxrl_llm.training.pairs import PairData, Pairs
from jaxrl_llm.training.pending import check_updates
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny
from tests.reference.slowly import first_quick

PAIRS, PROMPT, TIME = 4, 4, 12
ANSWERS = np.array([8, 1, 2, 5, 3, 4, 7, 2])
LENGTHS = PROMPT + ANSWERS
ORDER = np.array([4, 5, 0, 1, 6, 7, 2, 3])  # of the minibatch: pairs, not rows, are shuffled
CUTS = {  # layout, rows of a micro-batch
    "whole": ("padded", 0),
    "micro-batches": ("padded", 2),
    "packed": ("packed", 0),
    "packed micro-batches": ("packed", 4),
}


def arrays():
    rng = np.random.default_rng(0)
    column = np.arange(TIME)[None]
    segment_ids = (column < LENGTHS[:, None]).astype(np.int32)
    mask = (column >= PROMPT) & (segment_ids > 0)
    tokens = rng.integers(1, 16, (2 * PAIRS, TIME)).astype(np.int32)
    tokens[1::2, :PROMPT] = tokens[::2, :PROMPT]
    return {
        "tokens": np.where(segment_ids > 0, tokens, 0),
        "segment_ids": segment_ids,
        "loss_mask": mask,
        "advantages": np.where(mask, np.tile([1.0, -1.0], PAIRS)[:, None], 0).astype(np.float32),
        "ref_logprobs": np.where(mask, rng.normal(-2.7, 0.4, mask.shape), 0).astype(np.float32),
    }


def cut(layout, micro):
    updates = UpdateConfig(minibatches=1, micro_batch_rows=micro, layout=layout, shuffle="groups")
    groups = groups_of(arrays()["loss_mask"], LENGTHS, 2, 8)
    found = lay_out(ORDER, LENGTHS, TIME, updates, groups, together=2)
    return found if layout == "shared" else tiny.in_one_shape(found)


DESCENT = optax.sgd(1.0)  # parameters change by minus the gradient


@functools.cache
def update(name, layout="padded", micro=0, mesh=None):
    """(gradient, metrics) of one update."""
    model = tiny.make_model(mesh, num_hidden_layers=1, num_experts=0)
    settings = {"center_rewards_coefficient": 0.1} if name == "reward_model" else {"beta": 0.5}
    objective = objectives.make(name, **settings)
    learner = Learner(model, objective, DESCENT, rows=layout)
    params = tiny.draw_params(model, value_head=name == "reward_model")
    before, state = jax.device_get(params), make_state(model, params, DESCENT)
    batch = Rollout(**sharding.put_rows(arrays(), model.mesh))
    after, metrics = learner.update(state, batch, cut(layout, micro))
    return jax.tree.map(np.subtract, before, jax.device_get(after.trained.policy)), finalize(jax.device_get(metrics))


def assert_same(found, expected):
    (gradient, metrics), (wanted, others) = found, expected
    pairs = list(zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True))
    assert sum(np.abs(b).max() < 1e-6 for _, b in pairs) <= 1  # a reward does not go through the output matrix
    for a, b in pairs:
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max() + 1e-7)
    assert metrics == pytest.approx(others, rel=1e-4, abs=1e-6)
    assert metrics["pairs/incomplete"] == 0


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
@pytest.mark.parametrize("how", first_quick(1, sorted(CUTS.keys() - {"whole"}, key=len, reverse=True)))
def test_no_cut_changes_the_gradient(name, how):
    assert_same(update(name, *CUTS[how]), update(name, *CUTS["whole"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "reward_model"])
@pytest.mark.parametrize("mesh", [(2, 1, 1, 1), (1, 2, 1, 2)], ids=str)
def test_devices_change_nothing(name, mesh):
    assert_same(update(name, *CUTS["micro-batches"], mesh), update(name, *CUTS["whole"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_a_shared_prompt_changes_nothing(name):
    """Both answers in one row behind their prompt."""
    assert_same(update(name, "shared", 4), update(name, *CUTS["whole"]))


def test_a_run_lays_pairs_out_whole():
    """Packed, both rows of a pair in one micro-batch; where they are not, the run stops."""
    updates = UpdateConfig(minibatches=1, micro_batch_rows=4, layout="packed", shuffle="groups")
    learner = Learner(tiny.make_model(num_experts=0), objectives.make("simpo"), DESCENT, rows="packed")
    data = Mock(spec=PairData, answer_length=8, have_margins=False)
    stream = iter([arrays() | {"uid": np.arange(PAIRS)}])
    drawn = Pairs(learner, data, 0, PAIRS, updates).next(stream, 1, make_state(learner.model, {}, DESCENT))
    ((layout,),) = drawn.epochs
    members = [set(part[part >= 0] // TIME) for part in layout.index]
    assert sum(map(len, members)) == 2 * PAIRS
    assert all({row ^ 1 for row in rows} == rows for rows in members)
    bounds = dict(dtype="float32", sampler_dtype="float32", truncated=False, flipped=0.0)
    with pytest.raises(ValueError, match=r"step 3, update 2 of 2: 25\.0% of pairs lack one of their answers"):
        check_updates(3, {}, [{"pairs/incomplete": 0.0}, {"pairs/incomplete": 0.25}], **bounds)


def test_only_centring_moves_the_bias():
    """The bias shifts all rewards alike, so that of the two losses only centring moves it."""
    gradient, metrics = update("reward_model")
    assert metrics["pairs/margin"] == pytest.approx(metrics["pairs/reward_chosen"] - metrics["pairs/reward_rejected"])
    # d/d bias of -log sigma(r_c - r_r) is 0, of 0.1 (r_c + r_r)^2 it is 0.4 (r_c + r_r)
    both = metrics["pairs/reward_chosen"] + metrics["pairs/reward_rejected"]
    assert gradient["value_head"]["bias"] == pytest.approx(0.4 * both, rel=1e-4)
