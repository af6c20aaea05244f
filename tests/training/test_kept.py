"""Samples of a cut distribution train as those of a whole one: pi_old is the sampler in every layout and on a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.sharding import rollout_sharding
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.layout import UpdateConfig, epochs_of
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny

PROMPTS = np.random.default_rng(0).integers(1, 16, (2, tiny.PROMPT)).astype(np.int32)
LENGTHS, UIDS = np.array([4, 2], np.int32), np.array([7, 3], np.int32)
LIMITS = np.array([8, 1, 3, 5, 2, 4, 7, 6], np.int32)
CUTS = Sampling(0.9, top_k=6, top_p=0.8, min_p=0.02)
DENSE = {"num_experts": 0, "num_hidden_layers": 1}
ENGINE = Engine(tiny.make_model(**DENSE), CUTS, tiny.GROUP, tiny.ANSWER, end_ids=(16,), record_kept=True)


@functools.cache
def rollout(mesh=None, slots=0):
    model = tiny.make_model(mesh, **DENSE)
    engine = dataclasses.replace(ENGINE, model=model, slots=slots)
    out = engine.generate(tiny.draw_params(model), PROMPTS, LENGTHS, UIDS, jax.random.key(1), LIMITS)
    rewards = jnp.asarray(np.random.default_rng(0).random(tiny.ROWS), jnp.float32)
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), out).replace(rewards=rewards)


def layouts(updates):
    t = rollout()
    held, masks = np.asarray(t.segment_ids), np.asarray(t.loss_mask)
    return epochs_of(held, masks, tiny.GROUP, tiny.ANSWER, updates, seed=0, step=1)[0]


def learner(updates, mesh=None, **objective):
    """SGD at rate 1: the change of the parameters is minus the gradient."""
    chosen = objectives.make("grpo", entropy_coef=0.1, **objective)
    model = tiny.make_model(mesh, **DENSE)
    rows = "padded" if updates.layout == "auto" else updates.layout
    return Learner(model, chosen, optax.sgd(1.0), temperature=CUTS.temperature, rows=rows)


@functools.cache
def trained(updates, mesh=None, once=False):
    """(batch, metrics of scoring, metrics of the update, gradient)."""
    own = learner(updates, mesh, kl_coef=0.1)
    state = make_state(own.model, tiny.draw_params(own.model), own.optimizer)
    scorer = Scorer(own, ReplayConfig(), tiny.GROUP, first_forward=once)
    reference = state.policy.replace(trained=tiny.draw_params(own.model, seed=1))
    answers = jax.tree.map(
        lambda x: x if mesh is None else jax.device_put(x, rollout_sharding(x, own.model.mesh)), rollout()
    )
    batch, scored = tiny.learned(scorer, state, reference, answers, layouts(updates))
    before = jax.device_get(state.trained.policy)
    after, update = own.update(state, batch, layouts(updates)[0])
    gradient = jax.tree.map(np.subtract, before, jax.device_get(after.trained.policy))
    batch = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), batch)
    return batch, M.finalize(jax.device_get(scored)), M.finalize(jax.device_get(update)), gradient


SHAPES = [
    UpdateConfig(1),
    pytest.param(UpdateConfig(1, layout="packed"), marks=pytest.mark.slow),
    pytest.param(UpdateConfig(1, layout="shared", shuffle="groups"), marks=pytest.mark.slow),
    pytest.param(UpdateConfig(1, micro_batch_rows=2, length_buckets=2), marks=pytest.mark.slow),
    pytest.param(UpdateConfig(1, layout="packed", micro_batch_rows=4), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("updates", SHAPES, ids=lambda one: f"{one.layout} {one.micro_batch_rows}")
def test_the_first_ratio_is_one_in_every_layout(updates):
    """Over all tokens the mean gap would be 0.1; the reference is over the same tokens, and so is the gradient."""
    batch, scored, update, gradient = trained(updates)
    np.testing.assert_allclose(batch.old_logprobs * batch.loss_mask, rollout().sampler_logprobs, atol=1e-5)
    assert scored["check/old_sampler_mean"] < 1e-5 > update["check/current_old_mean"]
    assert update["kl/ref"] > 0.01
    expected = trained(UpdateConfig(1))
    np.testing.assert_allclose(
        np.where(batch.loss_mask, batch.ref_logprobs, 0), expected[0].ref_logprobs * batch.loss_mask, atol=1e-5
    )
    for found, wanted in zip(*map(jax.tree.leaves, (gradient, expected[3])), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max() + 1e-7)


def test_the_reference_is_over_the_same_tokens():
    """One with the parameters of the policy has the sampler's log-probs."""
    own = learner(UpdateConfig(1), kl_coef=0.1)
    state = make_state(own.model, tiny.draw_params(own.model), own.optimizer)
    scorer = Scorer(own, ReplayConfig(), tiny.GROUP)
    ref = scorer.score(state, state.policy, rollout(), layouts(UpdateConfig(1))).ref_logprobs
    np.testing.assert_allclose(ref * rollout().loss_mask, rollout().sampler_logprobs, atol=1e-5)


def test_without_the_record_pi_old_is_another_distribution():
    own = learner(UpdateConfig(1))
    policy = make_state(own.model, tiny.draw_params(own.model), own.optimizer).policy
    whole = own.score(policy, rollout().replace(kept=None), layouts(UpdateConfig(1)), {"logprobs"})["logprobs"]
    gap = np.abs(whole - rollout().sampler_logprobs)[rollout().loss_mask]
    assert gap.mean() > 0.1


def test_one_update_a_rollout_compares_its_own_forward_with_the_sampler():
    batch, _, update, gradient = trained(UpdateConfig(1), once=True)
    assert batch.old_logprobs is None
    assert update["check/old_sampler_mean"] < 1e-5
    for found, wanted in zip(*map(jax.tree.leaves, (gradient, trained(UpdateConfig(1))[3])), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max() + 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [(1, 2, 1, 2), (4, 1, 1, 1), (1, 1, 1, 4), (1, 2, 1, 1, 2)],
    ids=str,
)
def test_devices_agree_with_one(mesh):
    """The head's vocabulary over devices, and tokens; what was kept is sampled and recorded there, too."""
    here = rollout(mesh)
    np.testing.assert_array_equal(here.kept, rollout().kept)
    np.testing.assert_array_equal(here.tokens, rollout().tokens)
    found, expected = trained(UpdateConfig(1), mesh), trained(UpdateConfig(1))
    np.testing.assert_allclose(found[0].old_logprobs, expected[0].old_logprobs, atol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (found[3], expected[3])), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max() + 1e-7)


@pytest.mark.slow
def test_refilled_slots_record_the_same():
    assert (rollout(slots=3).kept == rollout().kept).all()
