"""The two feed-forward layers and the load-balance loss against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.ground import sharding
from jaxrl_llm.models.experts.moe import MoE, SwiGLU
from jaxrl_llm.models.gate import Gate
from jaxrl_llm.models.kernels import Kernels, Seen
from tests.reference import transformer_numpy


def seen(config):
    """Arguments of a feed-forward layer, of which it reads only the last ones."""
    none = jnp.zeros(0)
    return Seen((none, none), none, none, sharding.MICRO_BATCH, "packed", Kernels.of(config, None), config.gate)


def test_swiglu_equals_the_reference(tiny):
    layer = SwiGLU(tiny().config, nnx.Rngs(params=0))
    x = np.random.default_rng(0).standard_normal((2, 3, 16)).astype(np.float32)
    weights = [np.asarray(w[...], np.float64) for w in (layer.gate, layer.up, layer.down)]
    y, routing = layer(jnp.asarray(x), seen(tiny().config), None)
    assert routing is None
    for b, t in np.ndindex(2, 3):
        np.testing.assert_allclose(y[b, t], transformer_numpy.swiglu(x[b, t], *weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chosen", [1, 4])
def test_mixture_with_one_and_with_all_experts(tiny, chosen):
    config = tiny(num_experts=4, num_experts_per_tok=chosen).config
    layer = MoE(config, nnx.Rngs(params=0))
    x = np.random.default_rng(0).standard_normal((1, 2, 16)).astype(np.float32)
    graphdef, state = nnx.split(layer)
    y, routing = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x, seen(config), None))(state, x)
    weights = {name: np.asarray(getattr(layer, name)[...], np.float64) for name in ("router", "gate", "up", "down")}
    for t in range(2):
        expected, chosen_experts, router = transformer_numpy.mixture(x[0, t], weights, config)
        np.testing.assert_allclose(y[0, t], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(routing.experts[0, t], chosen_experts)
        np.testing.assert_allclose(routing.logits[0, t], router, rtol=1e-5, atol=1e-6)


def _loop(logits, experts, mask, sequence_ids):
    """E sum_e f_e p_e of each sequence, over sequences summed and over layers averaged; one token at a time."""
    layers, rows, time, num_experts = logits.shape
    total = 0.0
    for sequence in np.unique(sequence_ids[mask]):
        for layer in range(layers):
            share, prob, length = np.zeros(num_experts), np.zeros(num_experts), 0
            for b, t in np.ndindex(rows, time):
                if mask[b, t] and sequence_ids[b, t] == sequence:
                    length += 1
                    prob += transformer_numpy.softmax(logits[layer, b, t].astype(np.float64))
                    for e in experts[layer, b, t]:
                        share[e] += 1 / experts.shape[-1]
            total += num_experts * np.sum(share / length * prob / length) / layers
    return total, len(np.unique(sequence_ids[mask]))


def _problem(rows=4, time=6, layers=2, num_experts=5):
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((layers, rows, time, num_experts)).astype(np.float32)
    experts = np.argsort(-logits, axis=-1)[..., :2].astype(np.int32)
    mask = rng.random((rows, time)) < 0.7
    mask[1] = False  # a sequence without an unmasked token does not count
    return logits, experts, mask


_loss = jax.jit(Gate(5, 2).balance, static_argnames="num_sequences")


def test_load_balance_loss_equals_the_loop():
    logits, experts, mask = _problem()
    ids = np.broadcast_to(np.arange(4)[:, None], mask.shape)
    total, count = _loss(logits, experts, mask, ids, num_sequences=4)
    expected, sequences = _loop(logits, experts, mask, ids)
    assert total == pytest.approx(expected, rel=1e-5)
    assert count == sequences == 3


def test_load_balance_loss_does_not_depend_on_packing_or_order():
    """The four rows in two rows of twice the length, other order, ids with a gap: the same total and count."""
    logits, experts, mask = _problem()
    ids = np.broadcast_to(np.arange(4)[:, None], mask.shape)
    order = np.array([2, 0, 3, 1])
    pack = lambda x: np.concatenate([x[..., order[:2], :], x[..., order[2:], :]], axis=-1)  # noqa: E731
    pack_deep = lambda x: np.concatenate([x[:, order[:2]], x[:, order[2:]]], axis=2)  # noqa: E731
    whole = _loss(logits, experts, mask, ids, num_sequences=4)
    packed = _loss(pack_deep(logits), pack_deep(experts), pack(mask), pack(ids) * 2, num_sequences=8)
    np.testing.assert_allclose(packed, whole, rtol=1e-6)


def test_load_balance_loss_of_balance_and_of_collapse():
    """Uniform probabilities: 1 whatever is chosen. All tokens to one expert with certainty: E."""
    mask, ids = np.ones((1, 4), bool), np.zeros((1, 4), int)
    experts = np.array([[[[0, 1], [2, 3], [0, 1], [2, 3]]]])
    assert _loss(np.zeros((1, 1, 4, 4), np.float32), experts, mask, ids, num_sequences=1)[0] == pytest.approx(1)
    collapsed = np.full((1, 1, 4, 4), -50, np.float32)
    collapsed[..., 2] = 50
    same = np.full((1, 1, 4, 1), 2)
    assert _loss(collapsed, same, mask, ids, num_sequences=1)[0] == pytest.approx(4)


def test_load_balance_gradient_leaves_masked_tokens_alone():
    logits, experts, mask = _problem()
    ids = np.broadcast_to(np.arange(4)[:, None], mask.shape)
    grad = np.asarray(jax.grad(lambda x: _loss(x, experts, mask, ids, num_sequences=4)[0])(jnp.asarray(logits)))
    assert not np.any(grad[:, ~mask])
    assert np.all(np.abs(grad[:, mask]).max(axis=-1) > 0)


def test_a_mesh_that_spreads_experts_gives_the_same(tiny, params_of, forward, batch):
    """Groups, the bias and the gate of a shared expert are on every device, the shared expert is sliced as a dense
    layer is."""
    changes = dict(num_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, scoring_func="sigmoid")
    changes |= dict(selection_bias=True, shared_expert_intermediate_size=12, shared_expert_gate=True)
    model, spread = (tiny(mesh, **changes) for mesh in (None, sharding.make_mesh((1, 1, 2, 2))))
    params = params_of(model)
    placed = jax.device_put(params, sharding.shardings(spread.axes(), params, spread.mesh))
    logits, routing = forward(model, params, *batch)
    found, record = forward(spread, placed, *batch)
    inside = np.asarray(batch[1]) > 0
    np.testing.assert_allclose(found[inside], logits[inside], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(record.experts, routing.experts)
