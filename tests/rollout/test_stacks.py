"""Layers in one loop over stacks, as on TPUs, give the answers of layers one by one."""

import jax
import numpy as np
import pytest

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import Model
from jaxrl_llm.models.attention import kv_cache
from jaxrl_llm.rollout import engine as engine_module
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.placement import places
from jaxrl_llm.rollout.sampling import Sampling
from tests.reference.slowly import first_quick
from tests.reference.tiny_rollout import LENGTHS, PROMPTS, UIDS, VOCABULARY, tiny

# Stacks of one, two and two layers.
CONFIG = tiny(num_hidden_layers=5, mlp_only_layers=(0, 3, 4), experts_implementation="grouped")


@pytest.fixture
def stacked(monkeypatch):
    """The layout of TPUs, in short stretches, and programs of its own."""
    layout = kv_cache.STACKED._replace(multiple=4)
    monkeypatch.setattr(kv_cache, "_SHORTEST", 2)
    monkeypatch.setattr(kv_cache, "layout_of", lambda *_: layout)
    fresh = jax.jit(engine_module._generate.__wrapped__, static_argnums=(0, 1))
    monkeypatch.setattr(engine_module, "_generate", fresh)


def sampled(params, mesh=None, slots=0):
    model = Model(CONFIG, mesh)
    engine = Engine(model, Sampling(temperature=0.7), 3, 9, (VOCABULARY,), slots=slots, record_router_logits=True)
    if mesh is not None:
        params = jax.device_put(params, places(model, params))
    return engine.generate(engine.prepare(params), PROMPTS, LENGTHS, UIDS, jax.random.key(1))


@pytest.fixture(scope="module")
def params():
    return jax.jit(Model(CONFIG).init)(jax.random.key(0))


@pytest.fixture(scope="module")
def one_by_one(params):
    return sampled(params)


@pytest.mark.parametrize(("shape", "slots"), first_quick(1, [(None, 0), ((2, 1, 1, 2), 0), (None, 4)], several=True))
def test_stacks_give_the_same_answers(params, one_by_one, stacked, shape, slots):
    mesh = None if shape is None else sharding.make_mesh(shape)
    found = sampled(params, mesh, slots)
    np.testing.assert_array_equal(found.tokens, one_by_one.tokens)
    np.testing.assert_array_equal(found.routes.sampled.experts, one_by_one.routes.sampled.experts)
    np.testing.assert_allclose(found.routes.sampled.logits, one_by_one.routes.sampled.logits, atol=1e-5)
    np.testing.assert_allclose(found.sampler_logprobs, one_by_one.sampler_logprobs, atol=1e-5)


def test_a_cache_has_an_array_for_each_stack(stacked, params):
    model = Model(CONFIG)
    assert CONFIG.runs == [("dense", range(1)), ("moe", range(2)), ("dense", range(1, 3))]
    cache = model.empty_cache(4, 30)
    assert [[x.shape[0] for x in keys] for keys in cache.keys] == [[layers] * 8 for layers in (1, 2, 2)]
    assert {x.shape[1:] for stack in cache.values for x in stack} == {(4, 1, 4, 8)}
    unstacked = model.unstack(params)
    np.testing.assert_array_equal(unstacked["dense"][1]["mlp"]["up"], params["dense"]["mlp"]["up"][1:])
