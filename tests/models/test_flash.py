"""The kernels of GPUs and TPUs, stood in for on a CPU: they are given what makes them equal plain attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import ModelConfig, kernels
from jaxrl_llm.models.attention import choice, flash
from tests.reference.plain_attention import assert_close, plain, value_and_gradients
from tests.reference.slowly import first_quick

ROWS, TIME, HEADS, KV, HEAD = 2, 130, 4, 2, 64  # 130: padded to two blocks of columns


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    shape = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)  # noqa: E731
    tensors = shape(ROWS, TIME, HEADS, HEAD), shape(ROWS, KV, TIME, HEAD), shape(ROWS, KV, TIME, HEAD)
    segment_ids = jnp.asarray([[1] * 70 + [2] * 50 + [0] * 10, [3] * TIME], jnp.int32)
    return *tensors, segment_ids, shape(ROWS, TIME, HEADS, HEAD) * (segment_ids != 0)[:, :, None, None]


@pytest.fixture(scope="module")
def expected(problem):
    return value_and_gradients(plain, problem)


@pytest.fixture
def interpreted(monkeypatch):
    """The TPU's kernel as plain JAX."""
    monkeypatch.setattr(flash, "_splash", functools.partial(flash._splash, interpret=True))


@pytest.mark.parametrize(
    "shape", first_quick(1, [(2, 1, 1, 2), None, (1, 1, 1, 4)]), ids=["rows-heads", "alone", "beyond-heads"]
)
@pytest.mark.usefixtures("interpreted")
def test_splash_equals_plain_attention(problem, expected, shape):
    """Four devices do not divide two key heads: there every device has all of them."""
    mesh = None if shape is None else sharding.make_mesh(shape)
    found = value_and_gradients(lambda *x: flash.flash_attention(*x, mesh=mesh), problem)
    assert_close(found, expected)


@pytest.mark.parametrize("time", [TIME, TIME - 1])
def test_cudnn_sees_an_even_number_of_tokens(monkeypatch, problem, time):
    """Its backward refuses an odd one where there is a mask; XLA stands in for it."""
    seen = []

    def stand_in(queries, keys, values, *, mask, is_causal, implementation):
        seen.append((queries.shape[1], keys.shape[1], mask.shape[2:], implementation))
        return XLA(queries, keys, values, mask=mask, is_causal=is_causal)

    XLA = jax.nn.dot_product_attention
    cut = problem[0][:, :time], *(x[:, :, :time] for x in problem[1:3]), problem[3][:, :time], problem[4][:, :time]
    expected = value_and_gradients(plain, cut)
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(sharding, "platform", lambda mesh: "gpu")
    found = value_and_gradients(flash.flash_attention, cut)
    assert seen == [(TIME, TIME, (TIME, TIME), "cudnn")]
    assert_close(found, expected)


def test_cudnn_on_a_mesh_equals_plain_attention(monkeypatch, problem, expected):
    """Rows over two devices and heads over two; XLA stands in for the kernel."""
    XLA = jax.nn.dot_product_attention

    def stand_in(*arrays, mask, is_causal, implementation):
        assert (implementation, mask.shape[0]) == ("cudnn", problem[0].shape[0] // 2)
        return XLA(*arrays, mask=mask, is_causal=is_causal)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(sharding, "platform", lambda mesh: "gpu")
    mesh = sharding.make_mesh((2, 1, 1, 2))
    assert_close(value_and_gradients(lambda *x: flash.flash_attention(*x, mesh=mesh), problem), expected)


def test_cudnn_has_no_mask_for_rows_of_one_segment(monkeypatch, problem):
    """Causality keeps the padding behind it from every token; XLA stands in for the kernel."""
    XLA, masks = jax.nn.dot_product_attention, []

    def stand_in(*arrays, mask, is_causal, implementation):
        masks.append(mask)
        return XLA(*arrays, mask=mask, is_causal=is_causal)

    one = *problem[:3], (problem[3] > 0).astype(jnp.int32), problem[4]
    assert one[3].min() == 0
    expected = value_and_gradients(plain, one)
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(sharding, "platform", lambda mesh: "gpu")
    assert_close(value_and_gradients(lambda *x: flash.flash_attention(*x, rows="padded"), one), expected)
    assert masks == [None]


def test_the_primitive_of_cudnn_that_dots_keep():
    """Of a module that JAX may change; a plan of 0.6B on an H100 counts its forward once."""
    from jax._src.cudnn.fused_attention_stablehlo import _dot_product_attention_fwd_p_wrapper as forward

    assert choice.kept_of_attention(forward)


@pytest.mark.usefixtures("interpreted")
def test_dots_keep_what_attention_gave(monkeypatch, tiny, capsys):
    """The result and the sums of the softmax; blocks compute them again."""
    monkeypatch.setattr(kernels, "choose_attention", lambda *_: "flash")
    for remat, kept in (("dots", 2), ("block", 0)):
        model = tiny(head_dim=64, remat=remat)
        params = jax.eval_shape(model.init, jax.random.key(0))
        hidden = functools.partial(lambda model, p: model.apply(p, jnp.ones((1, 8), jnp.int32)).hidden, model)
        jax.ad_checkpoint.print_saved_residuals(hidden, params)
        assert capsys.readouterr().out.count("f32[2,1,4,128") == kept  # layers, rows, heads and a block of queries


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_splash_in_bfloat16(problem):
    """Against float32 arithmetic on the same rounded inputs; what remains is the rounding of weights and output."""
    low = [x.astype(jnp.bfloat16) for x in problem[:3]]
    out = flash.flash_attention(*low, problem[3])
    assert out.dtype == jnp.bfloat16
    exact = np.asarray(plain(*(x.astype(jnp.float32) for x in low), problem[3]))
    seen = np.asarray(problem[3]) != 0
    np.testing.assert_allclose(np.asarray(out, np.float32)[seen], exact[seen], atol=4 * 2**-8)


@pytest.mark.usefixtures("interpreted")
def test_routing_is_recorded_and_replayed_through_flash(monkeypatch, tiny):
    sizes = {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "rope_theta": 6e4, "num_hidden_layers": 1}
    model = tiny(**sizes)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 24, (2, 9)))
    apply = jax.jit(lambda model, params, routing: model.apply(params, tokens, routing=routing), static_argnums=0)
    expected = apply(model, params, None)
    monkeypatch.setattr(kernels, "choose_attention", lambda *_: "flash")
    other = dataclasses.replace(model, config=dataclasses.replace(model.config, attention_implementation="flash"))
    found = apply(other, params, None)
    np.testing.assert_array_equal(found.routing.experts, expected.routing.experts)
    np.testing.assert_allclose(found.hidden, expected.hidden, rtol=1e-4, atol=1e-4)
    shifted = expected.routing.replace(experts=(expected.routing.experts + 1) % 4)  # other experts than the router's
    replayed = apply(other, params, shifted)
    np.testing.assert_array_equal(replayed.routing.experts, shifted.experts)
    monkeypatch.undo()
    np.testing.assert_allclose(replayed.hidden, apply(model, params, shifted).hidden, rtol=1e-4, atol=1e-4)
    assert np.abs(replayed.hidden - found.hidden).max() > 0.01


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_a_model_with_flash_attention_is_the_same_model(monkeypatch, tiny):
    """Under rematerialisation and on a mesh; packed rows and padding."""
    sizes = {"head_dim": 64, "num_key_value_heads": 2, "num_attention_heads": 4, "remat": "block", "rope_theta": 5e4}
    model = tiny(sharding.make_mesh((2, 1, 1, 2)), **sizes)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 24, (2, 9)))
    segment_ids = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 9])

    def loss(params, model):
        hidden = model.apply(params, tokens, segment_ids=segment_ids).hidden
        return jnp.sum(jnp.square(model.logits(params, hidden)) * (segment_ids != 0)[:, :, None])

    expected = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, model)
    monkeypatch.setattr(kernels, "choose_attention", lambda *_: "flash")
    other = dataclasses.replace(model, config=dataclasses.replace(model.config, attention_implementation="flash"))
    found = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, other)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4), found, expected)


@pytest.mark.parametrize(
    ("platform", "dtype", "sizes"),
    [
        ("cpu", "bfloat16", ()),
        ("gpu", "bfloat16", (8, 64, 128)),
        ("gpu", "float32", ()),
        ("tpu", "bfloat16", (64, 128, 192, 256)),
        ("tpu", "float32", (64, 128, 192, 256)),
    ],
)
def test_where_there_is_a_library(platform, dtype, sizes):
    def chosen(implementation, head_dim):
        config = ModelConfig(vocab_size=8, head_dim=head_dim, dtype=dtype, attention_implementation=implementation)
        return choice.choose_attention(config, platform)

    for head_dim in (4, 8, 64, 128, 192, 256):
        assert chosen("plain", head_dim) == "plain"
        by_itself = head_dim in sizes and dtype == "bfloat16"
        assert chosen("auto", head_dim) == ("flash" if by_itself else "plain")
        if head_dim in sizes:
            assert chosen("flash", head_dim) == "flash"
        else:
            with pytest.raises(ValueError, match=f"this is {platform} with {dtype} and head_dim={head_dim}; set it"):
                chosen("flash", head_dim)
