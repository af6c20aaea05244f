"""Layers of linear attention: decoding from a state, packed rows, sizes, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import mixtures
from jaxrl_llm.ground import sharding
from jaxrl_llm.models import ModelConfig
from jaxrl_llm.models.attention import kv_cache
from jaxrl_llm.models.checkpoints.pretrained_config import family_of
from jaxrl_llm.models.kernels import Kernels
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from tests.models.conftest import SIZES

LENGTH = 9
DELTA = dict(
    layer_types=("linear_attention", "full_attention"),
    attn_output_gate=True,
    norm_offset=True,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=4,
    linear_value_head_dim=6,
)
TOKENS = np.random.default_rng(0).integers(0, 20, (2, LENGTH)).astype(np.int32)


@pytest.fixture(scope="module")
def whole():
    """(model, parameters, hidden states of two whole rows)."""
    model = Model(ModelConfig(**{**SIZES, **DELTA}))
    params = model.init(jax.random.key(0))
    return model, params, jax.jit(lambda tokens: model.apply(params, tokens).hidden)(TOKENS)


def test_decoding_is_the_whole_row(whole):
    """Prompts of five and three tokens in one prefill, then one by one; padding leaves states as they are, in a prefill
    and in a step, and a row that is filled again forgets its state."""
    model, params, expected = whole
    lengths, rows = np.array([5, 3]), jnp.arange(2)
    cache = model.empty_cache(2, LENGTH)
    cache = jax.tree.map(jnp.ones_like, cache)  # of an earlier answer
    of = jnp.asarray(np.arange(6)[None] < lengths[:, None], jnp.int32)
    prefilled = jax.jit(lambda t: model.apply(params, t, segment_ids=of, prefill=True, rows="padded"))(TOKENS[:, :6])
    cache = kv_cache.copy_rows(cache, rows, prefilled.cache, rows, 6)
    layers = model.unstack(params)
    step = jax.jit(lambda c, t, at, real: model.apply(layers, t, segment_ids=real, positions=at, cache=c))
    for column in range(3, LENGTH):
        at = np.minimum(np.maximum(column, lengths), LENGTH - 1)[:, None]
        real = (column >= lengths).astype(np.int32)[:, None]
        out = step(cache, np.take_along_axis(TOKENS, at, axis=1), at, real)
        cache = out.cache
        for row in np.flatnonzero(real[:, 0]):
            np.testing.assert_allclose(out.hidden[row, 0], expected[row, column], atol=1e-5)


@pytest.mark.slow
def test_several_tokens_go_on_from_a_state(whole):
    model, params, expected = whole
    prefilled = jax.jit(lambda t: model.apply(params, t, prefill=True))(TOKENS[:, :5])
    rows = jnp.arange(2)
    cache = kv_cache.copy_rows(model.empty_cache(2, LENGTH), rows, prefilled.cache, rows, 5)
    at = jnp.asarray(np.broadcast_to(np.arange(5, LENGTH), (2, LENGTH - 5)))
    out = jax.jit(lambda c, t: model.apply(params, t, positions=at, cache=c))(cache, TOKENS[:, 5:])
    np.testing.assert_allclose(out.hidden, expected[:, 5:], atol=1e-5)


@pytest.mark.slow
def test_packed_rows_do_not_see_each_other(whole):
    """Values and gradients of both rows in one, padding behind, and each beside padding."""
    model, params, _ = whole
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((2, LENGTH, SIZES["hidden_size"])).astype(np.float32)

    def summed(params, tokens, segments, weights):
        hidden = model.apply(params, tokens, segment_ids=segments).hidden
        return jnp.sum(jnp.where((segments != 0)[..., None], hidden * weights, 0)), hidden

    run = jax.jit(jax.value_and_grad(summed, has_aux=True))
    padded = np.pad(TOKENS, ((0, 0), (0, 2)))
    (total, apart), gradient = run(
        params, padded, (padded * 0 + 1) * (np.arange(11) < LENGTH), np.pad(weights, ((0, 0), (0, 2), (0, 0)))
    )
    segments = np.array([[1] * LENGTH + [2] * LENGTH + [0] * 3])
    tokens, flat = (
        np.pad(TOKENS.reshape(1, -1), ((0, 0), (0, 3))),
        np.pad(weights.reshape(1, -1, 16), ((0, 0), (0, 3), (0, 0))),
    )
    (packed, together), found = run(params, tokens, segments, flat)
    np.testing.assert_allclose(together[0, : 2 * LENGTH], apart[:, :LENGTH].reshape(-1, 16), atol=1e-5)
    np.testing.assert_allclose(packed, total, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max()), found, gradient)


def engine(model, **fields):
    return Engine(model, Sampling(0.0, 0, 1.0), 2, 6, end_ids=(1000,), **fields)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 1, 2), (2, 1, 2, 1)])
def test_a_mesh_changes_no_answer(whole, shape):
    """Whole rows, and greedy answers, of which fewer slots than answers change none either."""
    model, params, expected = whole
    mesh = sharding.make_mesh(shape)
    split = Model(model.config, mesh)
    placed = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, split.shapes()))
    with jax.set_mesh(mesh):
        found = jax.jit(lambda params, tokens: split.apply(params, tokens).hidden)(placed, TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    lengths, uids, key = np.array([LENGTH, 4]), np.arange(2), jax.random.key(0)
    engines = (engine(model), params), (engine(model, slots=2), params), (engine(split), placed)
    one, *others = [of.generate(given, TOKENS, lengths, uids, key) for of, given in engines]
    for other in others:
        np.testing.assert_array_equal(other.tokens, one.tokens)
        np.testing.assert_allclose(other.sampler_logprobs, one.sampler_logprobs, atol=1e-5)


@pytest.mark.parametrize("experts", [0, 2])
def test_parameters_that_act_are_counted(experts):
    """All but the norms and the embedding act on every token, where every expert is chosen."""
    model = Model(ModelConfig(**{**SIZES, **DELTA}, num_experts=experts, mlp_only_layers=(0,) if experts else ()))
    leaves = jax.tree_util.tree_leaves_with_path(model.shapes())
    sizes = {jax.tree_util.keystr(path): x.size for path, x in leaves}
    acts = sum(size for name, size in sizes.items() if "norm" not in name and "embedding" not in name)
    assert model.config.active_parameters == acts


@pytest.mark.parametrize(
    ("name", "total", "active"), [("qwen3_5_35b_a3b", 34.66, 2.44), ("qwen3_next_80b_a3b", 79.67, 3.25)]
)
def test_published_sizes(name, total, active):
    """Billions, by hand; 3B active with the embedding and the head, as the names say. A sequence has a state of 2 MiB
    a layer beside three inputs of the convolution."""
    config = ModelConfig(**mixtures._MODELS[name][0])
    found = sum(x.size for x in jax.tree.leaves(Model(config).shapes()))
    assert found / 1e9 == pytest.approx(total, abs=0.05)
    assert (config.active_parameters - config.vocab_size * config.hidden_size) / 1e9 == pytest.approx(active, abs=0.005)
    assert family_of(config) == "qwen3_next"
    state = kv_cache.empty_state(config, 1)
    assert (state.matrices.nbytes, state.window.shape) == (2 * 2**20, (1, 1, 3, 8192))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(layer_types=()), r"linear_attention in model\.layer_types needs model\.linear_num_key_heads=2"),
        (dict(linear_key_head_dim=0), r"model\.linear_key_head_dim=0, .* above 0"),
        (dict(linear_num_key_heads=3), r"the value heads a multiple of the key heads"),
        (dict(no_rope_layers=(0,)), r"have no form with model\.no_rope_layers=\(0,\)"),
        (dict(layer_types=("linear_attention", "sliding_attention"), sliding_window=3), "window=3"),
    ],
)
def test_fields_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**SIZES, **DELTA, **changes})


def test_what_has_no_form_is_refused_by_name(whole):
    model, params, _ = whole
    config = {**SIZES, **DELTA}
    with pytest.raises(
        ValueError, match=r"numerics=exact has no form for model\.linear_num_value_heads=4 and model\.att"
    ):
        Kernels.of(ModelConfig(**config, numerics="exact"), None)
    with pytest.raises(ValueError, match=r"linear_attention are not split over devices"):
        Kernels.of(ModelConfig(**config), sharding.make_mesh((1, 1, 1, 1, 2)))
    with pytest.raises(ValueError, match=r"\(updates\.layout=shared\) have no form for layers of linear_attention"):
        jax.eval_shape(lambda tokens: model.apply(params, tokens, rows="shared"), TOKENS)
