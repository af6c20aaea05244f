"""Attention from a latent: decoding over a cache of latents, packed rows, sizes, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import mixtures
from jaxrl_llm.ground import sharding
from jaxrl_llm.models import ModelConfig
from jaxrl_llm.models.attention import kv_cache, latent
from jaxrl_llm.models.checkpoints.pretrained_config import family_of
from jaxrl_llm.models.kernels import Kernels
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from tests.models.conftest import SIZES

LENGTH = 9
SIZE = dict(kv_lora_rank=6, qk_rope_head_dim=4, head_dim=10, v_head_dim=8, qk_norm="none")
LATENT = {**SIZES, **SIZE, "num_key_value_heads": 4}
TOKENS = np.random.default_rng(0).integers(0, 20, (2, LENGTH)).astype(np.int32)


@pytest.fixture(scope="module")
def whole():
    """(model, parameters, hidden states of two whole rows)."""
    model = Model(ModelConfig(**LATENT, q_lora_rank=5, attention_multiplier=0.4))
    params = model.init(jax.random.key(0))
    return model, params, jax.jit(lambda tokens: model.apply(params, tokens).hidden)(TOKENS)


@pytest.mark.parametrize("layout", [kv_cache.STRETCHES, pytest.param(kv_cache.STACKED, marks=pytest.mark.slow)])
def test_decoding_is_the_whole_row(whole, monkeypatch, layout):
    """A prefill of five tokens, then one by one; a cache holds a rotated key and a latent of each, and nothing else."""
    model, params, expected = whole
    of = Kernels.of
    monkeypatch.setattr(Kernels, "of", lambda config, mesh: of(config, mesh)._replace(cache=layout))
    cache = model.empty_cache(2, LENGTH)
    assert {x.size // (2 * LENGTH) for x in jax.tree.leaves(cache)} == {4, 6} or layout.stacked
    prefilled = jax.jit(lambda tokens: model.apply(params, tokens, prefill=True))(TOKENS[:, :5])
    np.testing.assert_allclose(prefilled.hidden, expected[:, :5], atol=1e-5)
    rows = jnp.arange(2)
    cache = kv_cache.copy_rows(cache, rows, prefilled.cache, rows, 5, layout)
    layers = model.unstack(params)
    step = jax.jit(lambda cache, t, at: model.apply(layers, t, positions=at, cache=cache))
    for column in range(5, LENGTH):
        out = step(cache, TOKENS[:, column : column + 1], np.full((2, 1), column))
        cache = out.cache
        np.testing.assert_allclose(out.hidden[:, 0], expected[:, column], atol=1e-5)


@pytest.mark.slow
def test_packed_rows_do_not_see_each_other(whole):
    model, params, expected = whole
    segments = jnp.repeat(jnp.array([[1, 2]]), LENGTH, axis=1)
    packed = jax.jit(lambda t: model.apply(params, t, segment_ids=segments).hidden)(TOKENS.reshape(1, -1))
    np.testing.assert_allclose(packed.reshape(expected.shape), expected, atol=1e-5)


def test_flash_kernels_are_given_one_size_of_a_head(whole, monkeypatch):
    """Values are padded to the size of keys, and the result is cut."""
    model, params, expected = whole
    of, sizes = Kernels.of, []
    monkeypatch.setattr(Kernels, "of", lambda config, mesh: of(config, mesh)._replace(attention="flash"))

    def plain(q, keys, values, segment_ids, mesh, axes, rows):
        sizes.append((q.shape[-1], keys.shape[-1], values.shape[-1]))
        causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None]
        return latent.attend_causal(q, keys, values, jnp.broadcast_to(causal, (2, LENGTH, LENGTH)))

    monkeypatch.setattr(latent, "_KERNELS", {"flash_attention": plain})
    found = jax.jit(lambda tokens: model.apply(params, tokens).hidden)(TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert set(sizes) == {(10, 10, 10)}


@pytest.mark.slow
def test_a_mesh_splits_heads(whole):
    """Whole rows, and greedy answers over a cache whose one head no axis splits."""
    model, params, expected = whole
    mesh = sharding.make_mesh((1, 2, 1, 2))
    split = Model(model.config, mesh)
    placed = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, split.shapes()))
    assert "tensor" in str(placed["dense"]["attention"]["kv_b"].sharding.spec)
    with jax.set_mesh(mesh):
        found = jax.jit(lambda params, tokens: split.apply(params, tokens).hidden)(placed, TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    answers = [
        Engine(one, Sampling(0.0, 0, 1.0), 2, 6, end_ids=(1000,)).generate(
            given, TOKENS, np.full(2, LENGTH), np.arange(2), jax.random.key(0)
        )
        for one, given in ((model, params), (split, placed))
    ]
    np.testing.assert_array_equal(answers[0].tokens, answers[1].tokens)
    np.testing.assert_allclose(answers[0].sampler_logprobs, answers[1].sampler_logprobs, atol=1e-5)


def test_a_mesh_cuts_what_is_made_of_a_latent():
    """A quarter of each matrix on each of four devices; hidden states have the bits that whole ones give."""
    config = ModelConfig(**{**LATENT, "kv_lora_rank": 8, "num_hidden_layers": 1}, q_lora_rank=4)
    mesh = sharding.make_mesh((1, 4, 1, 1))
    model, tokens = Model(config, mesh), np.concatenate([TOKENS, TOKENS[::-1]])
    cut = model.init_sharded(jax.random.key(0))
    names = {"q_b", "kv_b"}
    matrices = {name: cut["dense"]["attention"][name] for name in names}
    assert all(4 * sharding.local_bytes(x) == x.nbytes for x in matrices.values())
    whole = jax.device_put(matrices, sharding.replicated(mesh))

    def loss(params, tokens):
        hidden = model.apply(params, tokens).hidden
        return jnp.sum(jnp.tanh(hidden)), hidden

    def run(matrices):
        attention = cut["dense"]["attention"] | matrices
        params = cut | {"dense": cut["dense"] | {"attention": attention}}
        return jax.jit(jax.grad(loss, has_aux=True))(params, tokens)

    (gradients, hidden), (expected_gradients, expected) = run(matrices), run(whole)
    np.testing.assert_array_equal(hidden, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradients, expected_gradients)


@pytest.mark.parametrize("rank", [0, 5])
def test_parameters_that_act_are_counted(rank):
    """All but the norms and the embedding act on every token of a dense model."""
    model = Model(ModelConfig(**LATENT, q_lora_rank=rank))
    leaves = jax.tree_util.tree_leaves_with_path(model.shapes())
    sizes = {jax.tree_util.keystr(path): x.size for path, x in leaves}
    acts = sum(size for name, size in sizes.items() if "norm" not in name and "embedding" not in name)
    assert model.config.active_parameters == acts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(kv_lora_rank=0), r"are of attention from a latent; set model\.kv_lora_rank, or these to 0"),
        (dict(qk_rope_head_dim=10), r"qk_rope_head_dim=10 below model\.head_dim=10"),
        (dict(qk_rope_head_dim=3), r"an even model\.qk_rope_head_dim=3"),
        (dict(v_head_dim=0), r"v_head_dim=0 of 1 to head_dim"),
        (dict(qk_norm="head"), r"no form with model\.qk_norm='head'"),
        (dict(attention_bias=True), r"no form with model\.attention_bias=True"),
    ],
)
def test_fields_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**LATENT, **changes})


def test_what_has_no_kernel_is_refused_by_name():
    config = ModelConfig(**LATENT, numerics="exact")
    with pytest.raises(ValueError, match=r"numerics=exact has no form for model\.kv_lora_rank=6"):
        Kernels.of(config, None)
    with pytest.raises(ValueError, match=r"kv_lora_rank or linear_attention are not split over devices"):
        Kernels.of(ModelConfig(**LATENT), sharding.make_mesh((1, 1, 1, 1, 2)))
    further = dict(norm_placement="sandwich", norm_offset=True, hidden_act="gelu_tanh")
    with pytest.raises(ValueError, match=r"no form for model\.norm_placement='sandwich' and model\.norm_offset=True"):
        Kernels.of(ModelConfig(**SIZES, numerics="exact", **further), None)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("deepseek_v2_lite", 15.7, 2.24), ("moonlight", 15.96, 2.24), ("glm_4_7_flash", 29.9, 3.26)],
)
def test_published_sizes(name, total, active):
    """Billions: 15.7 of V2-Lite as published; of Moonlight 15.29 and two embeddings, 2.24 active without them, as its
    card says; of GLM-4.7-Flash, a "30B-A3B", by hand."""
    config = ModelConfig(**mixtures._MODELS[name][0])
    found = sum(x.size for x in jax.tree.leaves(Model(config).shapes()))
    assert found / 1e9 == pytest.approx(total, abs=0.05)
    assert (config.active_parameters - config.vocab_size * config.hidden_size) / 1e9 == pytest.approx(active, abs=0.005)
    assert family_of(config) in ("deepseek_v2", "deepseek_v3")  # the last reads back as either
