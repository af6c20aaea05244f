"""Replay with every objective, every implementation of the experts and every mesh: the same facts hold in each.

By default every value of every factor is in some cell, of the values that reach replay in ways of their own: an
objective that sees log-probabilities alone and one that reads the router; rows and slices of parameters over devices,
experts and width over devices. Every two of these values meet in some slow cell, under R2 and R3, which share its
compiled update. One device is in test_routing_replay.py; it, the other objectives and the mesh of rows alone meet all
others in the whole product, which is long.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.machine import forget_programs
from jaxrl_llm.models import scoring
from jaxrl_llm.models.routing import no_record
from jaxrl_llm.rollout.rollout import Routes
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny
from tests.reference.covering import pairwise
from tests.reference.slowly import first_quick

MODES, WHATS = ("R2", "R3"), ("experts", "logits")
IMPLEMENTATIONS = ["dense", "grouped", "blocks"]
MESHES = [(1, 1, 1, 1), (2, 2, 1, 1), (1, 1, 2, 2), (4, 1, 1, 1)]
OBJECTIVES = ["grpo", "gspo", "rspo", "sapo", "dapo", "cispo", "gmpo"]  # of equal advantages, so that they share scores
FACTORS = (IMPLEMENTATIONS, WHATS, MESHES[1:3], OBJECTIVES[1:3])
FIRST = [
    ("blocks", "experts", (2, 2, 1, 1), "gspo", "R3"),
    ("grouped", "experts", (1, 1, 2, 2), "rspo", "R2"),
    ("dense", "logits", (2, 2, 1, 1), "rspo", "R3"),
]
CELLS = pairwise(itertools.product(*FACTORS))
NAMES = ("implementation", "what", "mesh", "objective")
LAYOUT = tiny.layout_of(micro=4)


@pytest.fixture(autouse=True)
def _room_for_cells():
    """A cell takes a thousand maps."""
    forget_programs()


def test_the_first_cells_hold_every_value():
    for factor, values in enumerate((*FACTORS, MODES)):
        assert {cell[factor] for cell in FIRST} == set(values)


def test_every_two_values_meet():
    for one, other in itertools.combinations(range(len(FACTORS)), 2):
        assert {(cell[one], cell[other]) for cell in CELLS} == set(itertools.product(FACTORS[one], FACTORS[other]))


@functools.cache
def learner(objective="grpo", implementation="dense", mesh=None):
    """SGD at rate 1: the change of the parameters is minus the gradient. No aux loss: it would train the router."""
    model = tiny.make_model(mesh, experts_implementation=implementation)
    return Learner(model, objectives.make(objective), optax.sgd(1.0))


@functools.cache
def params(mesh=None, seed=0):
    return tiny.draw_params(learner(mesh=mesh).model, seed=seed)


def fresh_state(one, mesh):
    """A state may be donated: its parameters are a copy."""
    return make_state(one.model, jax.tree.map(jnp.copy, params(mesh)), one.optimizer)


@functools.cache
def rollout():
    """A rollout whose experts are those of another policy, so that R3 has something to change.

    The last token of an answer was never fed: it has no record.
    """
    trajectory = tiny.draw_trajectory()
    wanted = {"logprobs", "routing", "router_logits"}
    found = learner().score(Policy(params(seed=1)), trajectory, [LAYOUT], wanted)["routing"]
    fed = (np.arange(tiny.TIME) < tiny.LENGTHS[:, None] - 1)[None, :, :, None]
    sampled = found.replace(experts=jnp.where(fed, found.experts, no_record(found.experts)))
    return trajectory.replace(routes=Routes(sampled=sampled))


@functools.cache
def experience(replay, implementation="dense", mesh=None, router=False):
    """router: with the old router's logits, which RSPO needs."""
    one = learner("rspo" if router else "grpo", implementation, mesh)
    scorer = Scorer(one, ReplayConfig(*replay), tiny.GROUP)
    return tiny.learned(scorer, fresh_state(one, mesh), None, rollout(), [LAYOUT])


def old_logprobs(batch):
    """Those of the first update, and such that pi has moved away: clips and gates are at work then."""
    shift = 0.3 * np.random.default_rng(3).normal(size=(tiny.ROWS, tiny.TIME))
    return batch.old_logprobs, batch.old_logprobs + jnp.asarray(shift, jnp.float32)


@jax.jit
def forward_and_pull(params, routing, cotangents):
    """(log-probs, the router's logits) of the dense model on one device, and cotangents pulled back from them."""
    tokens, segment_ids = rollout().tokens, rollout().segment_ids

    def forward(params):
        out = scoring.score(learner().model, params, tokens, segment_ids, routing=routing, router_logits=True)
        return out.logprobs, out.routing.logits

    found, pull = jax.vjp(forward, params)
    return found, pull(cotangents)[0]


@functools.cache
def expected(replay, objective):
    """(loss, gradient) of both updates: the objective's own gradient on the whole batch, pulled through one forward."""
    recipe = objectives.make(objective)
    router = "router_logprobs" in recipe.needs
    batch, _ = experience(replay, router=router)
    logits = jnp.zeros((tiny.CONFIG.num_moe_layers, tiny.ROWS, tiny.TIME, tiny.CONFIG.num_experts))
    outputs, _ = forward_and_pull(params(), batch.routes.replayed, (jnp.zeros_like(batch.old_logprobs), logits))

    @jax.jit
    @jax.value_and_grad
    def loss(outputs, old):
        logprobs, logits = outputs
        arrays = {"logprobs": logprobs, "old_logprobs": old, "advantages": batch.advantages, "mask": batch.loss_mask}
        if router:
            gate, scored = tiny.CONFIG.gate, batch.routes.scored
            arrays["router_logprobs"] = gate.logprob(logits, scored.experts)
            arrays["old_router_logprobs"] = gate.logprob(scored.logits, scored.experts)
        return recipe(**arrays)[0]

    found = []
    for old in old_logprobs(batch):
        value, cotangents = loss(outputs, old)
        found.append((float(value), jax.device_get(forward_and_pull(params(), batch.routes.replayed, cotangents)[1])))
    return found


def check(replay, implementation, mesh, objective):
    """Facts of the first update of a rollout, and of one after pi has moved."""
    one = learner(objective, implementation, mesh)
    scored, gaps = experience(replay, implementation, mesh, "router_logprobs" in one.objective.needs)
    assert M.finalize(gaps)["check/unrecorded"] == 0
    for first, old, (loss, wanted) in zip(
        (True, False), old_logprobs(scored), expected(replay, objective), strict=True
    ):
        after, metrics = one.update(fresh_state(one, mesh), scored.replace(old_logprobs=old), LAYOUT)
        metrics = M.finalize(metrics)
        if first:
            assert metrics["check/current_old_mean"] < 1e-6
            assert abs(metrics["ratio/token_mean"] - 1) < 1e-6
        else:
            assert metrics["ratio/token_var"] > 0.05
        np.testing.assert_allclose(metrics["loss/total"], loss, rtol=1e-4, atol=1e-6)
        gradient = jax.tree.map(np.subtract, *jax.device_get((params(mesh), after.trained.policy)))
        router = np.abs(gradient["moe"]["mlp"]["router"]).max()
        assert router > 1e-4 if replay[1] == "experts" else router == 0
        for (path, a), (_, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (gradient, wanted)), strict=True):
            name, scale = jax.tree_util.keystr(path), np.abs(b).max()
            assert scale > 1e-4 or "router" in name
            np.testing.assert_allclose(a, b, rtol=0, atol=5e-5 * scale + 1e-9, err_msg=name)


@pytest.mark.parametrize((*NAMES, "mode"), first_quick(1, FIRST, several=True), ids=str)
def test_every_value(implementation, what, mesh, objective, mode):
    check((mode, what), implementation, mesh, objective)


@pytest.mark.slow
@pytest.mark.parametrize(NAMES, CELLS, ids=str)
def test_every_pair(implementation, what, mesh, objective):
    for mode in MODES:
        check((mode, what), implementation, mesh, objective)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(NAMES, list(itertools.product(IMPLEMENTATIONS, WHATS, MESHES, OBJECTIVES)), ids=str)
def test_the_whole_product(implementation, what, mesh, objective):
    for mode in MODES:
        check((mode, what), implementation, mesh, objective)
