"""Rollouts on another mesh than training's: the same answers, their rows where training has them, parameters moved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.scale.hlo import parse
from experiments.scale.hlo_cost import measure
from jaxrl_llm.ground import sharding
from jaxrl_llm.models import Model
from jaxrl_llm.rollout.engine import Engine, as_sampler
from jaxrl_llm.rollout.parameter_moves import route
from jaxrl_llm.rollout.placement import places
from jaxrl_llm.rollout.sampling import Sampling
from tests.reference.tiny_rollout import LENGTHS, PROMPTS, UIDS, VOCABULARY, tiny

GROUP, BOUND = 3, 9
FSDP, TENSOR, DATA = (1, 4, 1, 1), (1, 1, 1, 4), (4, 1, 1, 1)


def placed(params, shape, config):
    """Parameters as training has them on a mesh of this shape."""
    model = Model(config, sharding.make_mesh(shape))
    return jax.device_put(params, places(model, params))


def make_engine(config, shape=None, rows_on=None, **fields):
    mesh, rows = (None if one is None else sharding.make_mesh(one) for one in (shape, rows_on))
    return Engine(Model(config, mesh), Sampling(temperature=0.7), GROUP, BOUND, (VOCABULARY,), rows_on=rows, **fields)


def generate(engine, params):
    return engine.generate(params, PROMPTS, LENGTHS, UIDS, jax.random.key(1))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "slots"), [(TENSOR, 0), (DATA, 4)], ids=["tensor", "data"])
def test_the_answers_are_those_of_one_device(shape, slots):
    """Rows that training spreads over four devices: three of twelve answers each, records of routing included."""
    config = tiny()
    params = Model(config).init_sharded(jax.random.key(0))
    wanted = generate(make_engine(config), params)
    engine = make_engine(config, shape, FSDP, slots=slots)
    given = placed(params, FSDP, config)
    prepared = engine.prepare(given)
    found = generate(engine, prepared)
    for name in ("tokens", "segment_ids", "loss_mask", "truncated"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)
    np.testing.assert_allclose(found.sampler_logprobs, wanted.sampler_logprobs, atol=1e-5)
    np.testing.assert_array_equal(found.routes.sampled.experts, wanted.routes.sampled.experts)
    for x in jax.tree.leaves(found):
        assert x.addressable_shards[0].data.size == x.size // 4
        assert x.sharding.is_equivalent_to(sharding.rollout_sharding(x, engine.rows_on), x.ndim)
    for x, to in zip(*map(jax.tree.leaves, (prepared, places(engine.model, prepared))), strict=True):
        assert x.sharding.is_equivalent_to(to, x.ndim)
    assert engine.prepare(prepared) is prepared


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_what_is_moved_is_what_the_rollout_would_make(dtype):
    """Rounded, cut into layers and cast, bit for bit; a value head is not the model's and stays whole."""
    config = tiny()
    params = Model(config).init_sharded(jax.random.key(0))
    engine = make_engine(config, TENSOR, FSDP, dtype=dtype)
    found = engine.prepare(placed(params, FSDP, config) | {"value_head": {"kernel": jnp.ones(16)}})
    model, rounded = as_sampler(Model(config), params, dtype, engine.router)
    wanted = jax.jit(model.unstack, static_argnums=1)(rounded, model.config.compute_dtype)
    assert found.pop("value_head").keys() == {"kernel"}
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert {x.dtype for x in jax.tree.leaves(found)} == {x.dtype for x in jax.tree.leaves(wanted)}


def test_nothing_moves_where_both_meshes_lay_out_alike():
    """For a dense model the axes fsdp and expert are the same; without a mesh there is nothing to lay out."""
    config = tiny(num_experts=0)
    params = Model(config).init_sharded(jax.random.key(0))
    given = placed(params, FSDP, config)
    assert make_engine(config, (1, 1, 4, 1), FSDP).prepare(given) is given
    assert make_engine(config).prepare(params) is params
    abstract = Model(config, sharding.make_mesh(FSDP)).shapes()
    assert make_engine(config, (1, 1, 4, 1), FSDP).trace_prepare(abstract) is None
    assert make_engine(config, TENSOR, FSDP).trace_prepare(abstract) is not None


WAYS = {
    # Of 1024 numbers every device has 256 and sends 192 of them, once in four parts and twice in two.
    "one cut": ((FSDP, "fsdp"), (TENSOR, None, "tensor"), {"all-to-all": 192}),
    "two halves of a cut": ((FSDP, "fsdp"), ((1, 1, 2, 2), None, "expert", "tensor"), {"all-to-all": 256}),
    # It gets the half that it lacks of one dimension after it has given away a half of another.
    "half gathered": ((FSDP, "fsdp"), ((2, 1, 1, 2), None, None, "tensor"), {"all-to-all": 128, "all-gather": 256}),
    # Both devices of a pair have the same half: each takes a part of it, and nothing moves.
    "copies cut": (((2, 2, 1, 1), "fsdp"), ((1, 1, 2, 2), "tensor", "expert"), {}),
    "gathered": ((FSDP, "fsdp"), (DATA,), {"all-gather": 768}),
}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_move_by_the_fewest_bytes(way):
    """XLA alone gathers whole arrays where several dimensions change; it warns of that on standard error only."""
    (first, *cuts), (second, *wanted), sent = WAYS[way]
    here = NamedSharding(sharding.make_mesh(first), PartitionSpec(*cuts))
    there = NamedSharding(sharding.make_mesh(second), PartitionSpec(*wanted))

    def moved(x):
        for place in (*route(here, there, 3), there):
            x = jax.lax.with_sharding_constraint(x, place)
        return x

    x = jax.device_put(np.arange(1024, dtype=np.float32).reshape(16, 8, 8), here)
    compiled = jax.jit(moved).lower(x).compile()
    found = compiled(x)
    np.testing.assert_array_equal(found, x)
    assert found.sharding.is_equivalent_to(there, 3)
    once, _ = measure(parse(compiled.as_text()), 4)
    assert {kind: size / 4 for kind, (_, size) in once.collectives.items()} == sent


def test_the_abstract_program_is_the_one_that_runs():
    """Lowered from the parameters of training: its arguments are those of `prepare`, layer by layer and in place."""
    config = tiny()
    engine = make_engine(config, TENSOR, FSDP, dtype="bfloat16")
    lowered = engine.trace(Model(config, sharding.make_mesh(FSDP)).shapes(), 4, 5).lower()
    arguments = lowered.in_avals[0][0]
    assert {x.dtype.name for x in jax.tree.leaves(arguments["moe"])} == {"bfloat16", "float32"}
    assert len(arguments["moe"]) == config.num_hidden_layers
    assert arguments["moe"][0]["mlp"]["gate"].shape == (4, 16, 16)
