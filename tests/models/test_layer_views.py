"""Layers that differ: windows, sinks and RoPE by layer, in whole rows, packed rows and over every layout of a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import ModelConfig
from jaxrl_llm.models.attention import kv_cache
from jaxrl_llm.models.attention.attend import attend
from jaxrl_llm.models.attention.rotary import Rope, rotation
from jaxrl_llm.models.kernels import Kernels
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from tests.models.conftest import SIZES

LENGTH, WINDOW = 9, 3
MIXED = dict(
    **{**SIZES, "num_hidden_layers": 3},
    sliding_window=WINDOW,
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    no_rope_layers=(1,),
    attention_sinks=True,
)
TOKENS = np.random.default_rng(0).integers(0, 20, (2, LENGTH)).astype(np.int32)


@pytest.fixture(scope="module")
def mixed():
    """(model, parameters, hidden states of two whole rows)."""
    model = Model(ModelConfig(**MIXED))
    params = model.init(jax.random.key(0))
    params["dense"]["attention"]["sinks"] += 0.5
    return model, params, jax.jit(lambda tokens: model.apply(params, tokens).hidden)(TOKENS)


def test_packed_rows_do_not_see_each_other(mixed):
    model, params, whole = mixed
    segments = jnp.repeat(jnp.array([[1, 2]]), LENGTH, axis=1)
    packed = jax.jit(lambda t: model.apply(params, t, segment_ids=segments).hidden)(TOKENS.reshape(1, -1))
    np.testing.assert_allclose(packed.reshape(whole.shape), whole, atol=1e-5)


@pytest.mark.parametrize("layout", [kv_cache.STRETCHES, kv_cache.STACKED])
def test_decoding_is_the_whole_row(mixed, monkeypatch, layout):
    """Column by column, in a cache by layer and in one by stack."""
    model, params, whole = mixed
    of = Kernels.of
    monkeypatch.setattr(Kernels, "of", lambda config, mesh: of(config, mesh)._replace(cache=layout))
    layers, cache = model.unstack(params), model.empty_cache(2, LENGTH)
    step = jax.jit(lambda cache, t, at: model.apply(layers, t, positions=at, cache=cache))
    for column in range(LENGTH):
        out = step(cache, TOKENS[:, column : column + 1], np.full((2, 1), column))
        cache = out.cache
        np.testing.assert_allclose(out.hidden[:, 0], whole[:, column], atol=1e-5)


def test_a_token_reaches_as_far_as_its_window_and_sinks_take_a_share():
    """One layer, against a softmax in numpy over the columns seen and the sink."""
    config = ModelConfig(**{**SIZES, "num_hidden_layers": 1}, sliding_window=WINDOW, attention_sinks=True)
    model = Model(config)
    params = model.init(jax.random.key(1))
    hidden = jax.jit(lambda t: model.apply(params, t).hidden[0])
    moved = np.abs(hidden(TOKENS[:1]) - hidden(np.where(np.arange(LENGTH) == 2, 21, TOKENS[:1]))).max(-1) > 1e-6
    np.testing.assert_array_equal(np.flatnonzero(moved), np.arange(2, 2 + WINDOW))
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, 1, 2, 4, 8)).astype(np.float32)  # [b h t d]
    sinks, seen = np.array([0.3, -1.0], np.float32), np.tril(np.ones((4, 4), bool))
    weights = np.where(seen, np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(8)), 0)
    expected = (weights / (weights.sum(-1, keepdims=True) + np.exp(sinks)[None, :, None, None])) @ v
    out = attend(
        jnp.asarray(q.swapaxes(1, 2)), jnp.asarray(k), jnp.asarray(v), jnp.asarray(seen[None]), jnp.asarray(sinks)
    )
    np.testing.assert_allclose(out.swapaxes(1, 2), expected, atol=1e-6)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    """theta = 10^4, 4 pairs, original length 2 pi 100: a pair turns 100 theta^(-i/4) times, that is 100, 10, 1, 0.1."""
    scaling = (4.0, 2 * np.pi * 100, 10.0, 1.0, 0.0, 0.0)
    cos, _ = rotation(jnp.array([[1]]), Rope(8, 1e4, scaling, "yarn"))
    factor = 0.1 * np.log(4) + 1
    frequency = np.array([1, 0.1, 0.01 / 4, 0.001 / 4])
    np.testing.assert_allclose(cos[0, 0, 0], factor * np.cos(frequency), rtol=1e-6)


def test_a_dynamic_rope_is_the_plain_one_and_refuses_longer_sequences():
    """In both loops of a rollout. A last token is not fed: a cache has a column less than answers have tokens."""
    plain, dynamic = Rope(8, 1e4), Rope(8, 1e4, (4.0, 16.0), "dynamic")
    for one, other in zip(*(rotation(jnp.arange(16)[None], rope) for rope in (plain, dynamic)), strict=True):
        np.testing.assert_array_equal(one, other)
    sizes = {**SIZES, "num_hidden_layers": 1}
    model = Model(ModelConfig(**sizes, rope_type="dynamic", rope_scaling=(4.0, 16.0)))
    shapes = model.shapes()
    Engine(model, Sampling(), 2, 16 - LENGTH, (1,)).trace(shapes, 2, LENGTH)
    for slots in (0, 1):
        with pytest.raises(ValueError, match=r"up to max_position_embeddings=16 tokens, and .* may have 1[78]"):
            Engine(model, Sampling(), 2, 18 - LENGTH, (1,), slots=slots).trace(shapes, 2, LENGTH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(layer_types=("sliding_attention",)), "must be .* for each of model.num_hidden_layers=3"),
        (dict(layer_types=("full_attention",) * 3), "model.sliding_window=3 does not fit"),
        (dict(no_rope_layers=(3,)), r"model.no_rope_layers=\(3,\) must name layers below"),
        (dict(rope_type="yarn", rope_scaling=(4.0, 16.0)), "the 6 positive numbers factor, original_max_position"),
        (dict(swiglu_limit=7.0, experts_implementation="blocks"), "experts_implementation='blocks' has no form"),
    ],
)
def test_fields_of_layers_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**MIXED, **changes})


def test_what_has_no_kernel_is_refused_by_name():
    config = ModelConfig(**MIXED)
    with pytest.raises(ValueError, match="attention_implementation='flash' has no kernel here"):
        Kernels.of(dataclasses.replace(config, attention_implementation="flash"), None)
    mesh = sharding.make_mesh((1, 1, 1, 1, 2), devices=jax.devices()[:2])
    with pytest.raises(
        ValueError, match=r"model\.attention_sinks, model\.kv_lora_rank or linear_attention are not split over devices"
    ):
        Kernels.of(config, mesh)
    experts = {"num_experts": 4, "expert_bias": True, "experts_implementation": "auto", "numerics": "exact"}
    with pytest.raises(ValueError, match=r"model\.numerics=exact has no form for experts with"):
        Kernels.of(ModelConfig(**{**SIZES, **experts}), None)
