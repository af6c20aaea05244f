"""What goes between devices: the same elements as on one device, and no device ever has a whole record of routing."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground import sharding
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.rollout.rollout import Routes
from jaxrl_llm.training.exchange import bring, bring_back
from jaxrl_llm.training.indexing import put, take
from jaxrl_llm.training.layout import Layout
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny
from tests.reference.slowly import first_quick

LAYERS, ROWS, TIME, K = 2, 8, 6, 3
MESHES = ((4, 1, 1, 1), (2, 1, 2, 1), (1, 2, 1, 2), (1, 2, 1, 1, 2))


def rollout(seed=0):
    """One array of every kind: tokens, a mask, log-probs, kept tokens and a record of experts."""
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(1, 99, (ROWS, TIME)).astype(np.int32),
        "mask": rng.random((ROWS, TIME)) < 0.5,
        "logprobs": rng.normal(size=(ROWS, TIME)).astype(np.float32),
        "kept": rng.integers(0, 99, (ROWS, TIME, K + 1)).astype(np.int32),
        "experts": rng.integers(0, 8, (LAYERS, ROWS, TIME, K)).astype(np.uint8),
    }


def layout(shape, seed=1):
    """Any tokens of the rollout in any places, each at most once, and padding."""
    places = np.random.default_rng(seed).permutation(ROWS * TIME)[: np.prod(shape)]
    index = np.where(places % 5 == 0, -1, places).reshape(shape).astype(np.int32)
    return Layout(index, (index >= 0).astype(np.int32), np.asarray(shape[0], np.int32))


def on(mesh, tree):
    return jax.tree.map(lambda x: jax.device_put(x, sharding.rollout_sharding(x, mesh)), tree)


@pytest.mark.parametrize("shape", first_quick(2, MESHES), ids=str)
def test_devices_get_what_one_device_takes_and_give_back_what_it_puts(shape):
    mesh, cut = sharding.make_mesh(shape), layout((2, 4, 6))
    there = jax.jit(functools.partial(bring, mesh=mesh))(on(mesh, rollout()), cut.index)
    expected = take(jax.tree.map(jnp.asarray, rollout()), cut, slice(None))
    jax.tree.map(np.testing.assert_array_equal, there, expected)
    assert (np.asarray(there["kept"])[cut.index < 0] == -1).all()
    local = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(there)]
    places = [shape[2:4] if len(shape) == 5 else shape[1:3] for shape in local]
    assert {rows * time for rows, time in places} == {4 * 6 // sharding.shards("rows", mesh)}
    other = rollout(2)
    for read_only in (there, expected, other):
        del read_only["kept"]
    back = jax.jit(functools.partial(bring_back, mesh=mesh))(on(mesh, other), there, cut.index)
    for micro in range(2):
        one = jax.tree.map(lambda x, m=micro: x[m] if x.ndim == 3 else x[:, m], expected)
        other = put(jax.tree.map(jnp.asarray, other), one, cut, micro)
    jax.tree.map(np.testing.assert_array_equal, back, other)
    assert back["experts"].sharding.shard_shape(back["experts"].shape)[1] == ROWS // sharding.shards("rows", mesh)


def compiled(function, *args):
    """The program of a function, from the bare arrays of its arguments."""
    leaves, structure = jax.tree.flatten(args)
    return jax.jit(lambda leaves: function(*jax.tree.unflatten(structure, leaves))).lower(leaves).compile()


def largest_record(program):
    """Elements of the largest array of bytes, the type of a record of experts, that one device has."""
    return max(
        np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"u8\[([\d,]+)\]", program.as_text())
    )


@pytest.mark.slow
def test_no_device_ever_has_a_whole_record_of_routing():
    """On four devices none has more than a quarter, in no program of training; the control has it all."""
    mesh = sharding.make_mesh(MESHES[0])
    model = tiny.make_model(MESHES[0])
    learner = Learner(model, objectives.make("grpo"), optax.sgd(1.0))
    experts = np.zeros((model.config.num_moe_layers, tiny.ROWS, tiny.TIME, 2), np.uint8)
    records = on(mesh, Routing(jnp.asarray(experts)))
    drawn = tiny.draw_batch(routes=Routes(scored=records, replayed=records))
    batch = on(mesh, drawn.replace(old_values=None, returns=None))
    params, cut = tiny.draw_params(model), tiny.layout_of(micro=4)
    state = make_state(model, params, learner.optimizer)
    update = compiled(lambda state, batch: learner.update(state, batch, cut), state, batch)
    wanted = {"logprobs", "routing"}
    score = compiled(lambda *args: learner.score(*args, [cut], wanted), Policy(params), batch)
    whole = sharding.replicated(mesh)
    control = compiled(lambda x: jax.lax.with_sharding_constraint(x, whole), records.experts)
    assert largest_record(control) == experts.size
    assert largest_record(update) == largest_record(score) == experts.size // 4
