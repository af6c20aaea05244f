"""LoRA: no change at the start, gradients of the chain rule, merged and apart the same, on one device and on many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground import sharding
from jaxrl_llm.models.lora import LoRAConfig, adapter_axes, attach, init_adapters, merge
from jaxrl_llm.training.policy import Policy

MOE = dict(num_experts=4, mlp_only_layers=(0,))
EVERYTHING = LoRAConfig(rank=2, alpha=3.0, targets="attention,mlp,router")


def drawn(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, x.dtype), tree)


@pytest.fixture(scope="module")
def problem(tiny, params_of):
    """(model, its parameters, adapters with A and B drawn): a dense and an MoE layer, every matrix a target."""
    model = tiny(**MOE)
    return model, params_of(model), drawn(init_adapters(EVERYTHING, model, jax.random.key(0)))


@functools.partial(jax.jit, static_argnums=0)
def _hidden(model, params, tokens):
    return model.apply(params, tokens).hidden


def test_the_scale_is_alpha_over_the_rank():
    assert LoRAConfig(rank=4, alpha=6.0).scale == 1.5


def test_the_tree(problem):
    model, params, _ = problem
    adapters = init_adapters(EVERYTHING, model, jax.random.key(0))
    assert set(adapters) == {"dense", "moe"}
    shapes = {"/".join(k.key for k in path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(adapters)}
    assert len(shapes) == 2 * (4 + 3) + 2 * (4 + 3 + 1)
    assert shapes["dense/attention/q/a"] == (1, 16, 2)
    assert shapes["dense/attention/k/b"] == (1, 2, 16)
    assert shapes["moe/mlp/down/a"] == (1, 4, 12, 2)
    assert shapes["moe/mlp/router/b"] == (1, 2, 4)
    axes = adapter_axes(EVERYTHING, model)
    assert axes["moe"]["mlp"]["up"] == {
        "a": ("layers", "expert", "embed", "rank"),
        "b": ("layers", "expert", "rank", "mlp"),
    }
    assert jax.tree.structure(axes, is_leaf=lambda x: isinstance(x, tuple)) == jax.tree.structure(adapters)
    a = adapters["moe"]["attention"]["q"]["a"]
    assert 0.15 < float(jnp.std(a)) < 0.4  # 1 / sqrt(16)
    only = init_adapters(LoRAConfig(rank=2, targets="attention"), model, jax.random.key(0))
    assert set(only["moe"]) == {"attention"}
    np.testing.assert_array_equal(only["moe"]["attention"]["q"]["a"], a)  # whatever the other targets are
    assert params["moe"]["attention"]["q"].shape == (1, 16, 32)


def test_a_shared_expert_is_a_target(tiny):
    model = tiny(num_experts=4, shared_expert_intermediate_size=6, shared_expert_gate=True, selection_bias=True)
    adapters = adapter_axes(EVERYTHING, model)["moe"]["mlp"]
    assert set(adapters) == {"gate", "up", "down", "router", "shared"}  # neither the bias nor the gate of one column
    assert adapters["shared"]["up"] == {"a": ("layers", "embed", "rank"), "b": ("layers", "rank", "mlp")}


def test_zero_b_changes_no_bit(problem, batch):
    model, params, _ = problem
    adapters = init_adapters(EVERYTHING, model, jax.random.key(0))
    tokens, _ = batch
    expected = _hidden(model, params, tokens)
    np.testing.assert_array_equal(_hidden(model, attach(params, adapters, EVERYTHING.scale), tokens), expected)
    jax.tree.map(np.testing.assert_array_equal, merge(params, adapters, EVERYTHING.scale), params)


def test_merged_is_what_was_apart(problem, batch):
    """Also cut into layers, as the decode loop has them; and W + alpha / r A B by hand."""
    model, params, adapters = problem
    tokens, _ = batch
    apart = attach(params, adapters, EVERYTHING.scale)
    together = merge(params, adapters, EVERYTHING.scale)
    expected = _hidden(model, together, tokens)
    np.testing.assert_allclose(_hidden(model, apart, tokens), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(_hidden(model, model.unstack(apart), tokens), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected - _hidden(model, params, tokens)).max() > 0.05
    a, b = (np.asarray(adapters["moe"]["mlp"]["up"][name])[0, 3] for name in "ab")
    by_hand = np.asarray(params["moe"]["mlp"]["up"])[0, 3] + 3.0 / 2 * a @ b
    np.testing.assert_allclose(together["moe"]["mlp"]["up"][0, 3], by_hand, rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(together) == jax.tree.structure(params)
    sampled = Policy(adapters, params, EVERYTHING.scale).plain(model)  # by one program
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), sampled, together)


def _gradient(model, params, adapters, tokens):
    def loss(adapters):
        out = model.apply(attach(params, adapters, EVERYTHING.scale), tokens)
        return jnp.sum(jnp.sin(out.hidden))

    return jax.grad(loss)(adapters)


gradient = jax.jit(_gradient, static_argnums=0)


def test_gradients_are_those_of_the_chain_rule(problem, batch):
    """dA = s dW B^T and dB = s A^T dW, with dW the gradient of the whole matrices."""
    model, params, adapters = problem
    tokens, _ = batch

    def loss(params):
        return jnp.sum(jnp.sin(model.apply(params, tokens).hidden))

    weights = jax.jit(jax.grad(loss))(merge(params, adapters, EVERYTHING.scale))
    gradients = gradient(model, params, adapters, tokens)
    for path, pair in jax.tree_util.tree_leaves_with_path(adapters, is_leaf=lambda x: set(x) == {"a", "b"}):
        dw, given = weights, gradients
        for key in path:
            dw, given = dw[key.key], given[key.key]
        for name, expected in (
            ("a", EVERYTHING.scale * dw @ jnp.swapaxes(pair["b"], -1, -2)),
            ("b", EVERYTHING.scale * jnp.swapaxes(pair["a"], -1, -2) @ dw),
        ):
            np.testing.assert_allclose(given[name], expected, rtol=1e-3, atol=1e-4, err_msg=f"{path} {name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 2, 2, 1), id="fsdp-expert"),
        pytest.param((2, 1, 1, 2), id="data-tensor"),
    ],
)
def test_on_a_mesh(problem, tiny, batch, shape):
    model, params, adapters = problem
    tokens, _ = batch
    expected = gradient(model, params, adapters, tokens)
    mesh = sharding.make_mesh(shape)
    split = tiny(mesh, **MOE)
    places = sharding.shardings(adapter_axes(EVERYTHING, split), adapters, mesh)
    born = init_adapters(EVERYTHING, split, jax.random.key(0))
    assert jax.tree.map(lambda x: x.sharding, born) == places
    found = gradient(
        split,
        jax.device_put(params, sharding.shardings(split.axes(), params, mesh)),
        jax.device_put(adapters, places),
        sharding.put_rows(tokens, mesh),
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), found, expected)


@pytest.mark.slow
def test_frozen_weights_cost_no_gradient(tiny, params_of, batch):
    """FLOPs of a step of the adapters against one of all parameters, dense: 2 of 3 matmuls and a little."""
    model = tiny(hidden_size=64, intermediate_size=256, head_dim=16)
    params = params_of(model)
    config = LoRAConfig(rank=1)
    adapters = init_adapters(config, model, jax.random.key(0))
    tokens = jnp.zeros((4, 64), jnp.int32)

    def loss(params):
        return jnp.sum(model.apply(params, tokens).hidden ** 2)

    def flops(f, x):
        return jax.jit(jax.grad(f)).lower(x).compile().cost_analysis()["flops"]

    ours = flops(lambda adapters: loss(attach(params, adapters, config.scale)), adapters)
    assert ours < 0.8 * flops(loss, params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rank=-1), r"lora\.rank=-1 must be at least 0; 0 trains every parameter"),
        (dict(alpha=0.0), r"lora\.alpha=0\.0 is out of range"),
        (dict(targets="mlp, atention"), r"lora\.targets='atention' is unknown \(did you mean 'attention'\?\)"),
    ],
)
def test_bad_fields(changes, message):
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**{"rank": 2, **changes})


def test_nothing_to_adapt(tiny):
    with pytest.raises(ValueError, match=r"lora\.rank=0 has no adapters"):
        init_adapters(LoRAConfig(), tiny(), jax.random.key(0))
    with pytest.raises(ValueError, match=r"lora\.targets='router' name no matrix of this model"):
        init_adapters(LoRAConfig(rank=2, targets="router"), tiny(), jax.random.key(0))
