"""The whole transformer: against a slow reference, causal to the last bit, the same in every form it can run in."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.scale.hlo import parse
from experiments.scale.hlo_cost import measure
from jaxrl_llm.ground import sharding
from jaxrl_llm.models import Routing, in_a_loop, transformer
from jaxrl_llm.models.attention import kv_cache
from jaxrl_llm.models.attention.grouped_query import positions_of
from jaxrl_llm.models.layers import FEW_ROWS, Transposed, embedded, project
from tests.reference import transformer_numpy
from tests.reference.slowly import first_quick

MOE = dict(num_experts=4, num_experts_per_tok=2)
MIXED = dict(**MOE, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=(1,), tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        (dict(), "dd"),
        (dict(tie_word_embeddings=True, num_key_value_heads=4, head_dim=2), "dd"),
        (dict(**MOE, experts_implementation="auto"), "mm"),
        (dict(**MOE, norm_topk_prob=False, num_key_value_heads=1), "mm"),
        (MIXED, "dddm"),
    ],
    ids=["dense", "tied", "moe", "not-renormalised", "mixed"],
)
def test_equals_the_reference(tiny, params_of, forward, batch, changes, kinds):
    model = tiny(**changes)
    assert "".join(kind[0] for kind in model.config.kinds) == kinds
    tokens, segment_ids = batch
    valid = np.asarray(segment_ids) != 0
    params = params_of(model)
    assert ("head" in params["ends"]) is not model.config.tie_word_embeddings
    logits, routing = forward(model, params, tokens, segment_ids)
    expected, experts, router = transformer_numpy.transformer(params, model.config, tokens, segment_ids)
    np.testing.assert_allclose(logits[valid], expected[valid], rtol=1e-5, atol=1e-5)
    if "m" not in kinds:
        assert routing is None
        return
    assert routing.experts.shape[0] == routing.logits.shape[0] == kinds.count("m")  # a dense layer has no row
    np.testing.assert_array_equal(np.asarray(routing.experts)[:, valid], experts[:, valid])
    np.testing.assert_allclose(routing.logits[:, valid], router[:, valid], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [dict(), MOE], ids=["dense", "moe"])
def test_no_gradient_from_the_future_another_segment_or_padding(tiny, params_of, batch, changes):
    """Every token of the batch is another one, so the gradient of its embedding is that of its place."""
    model = tiny(**changes)
    params = params_of(model)
    tokens, segment_ids = batch

    @jax.jit
    def dependence(embedding):
        def logits(embedding):
            full = {**params, "ends": {**params["ends"], "embedding": embedding}}
            return model.logits(full, model.apply(full, tokens, segment_ids=segment_ids).hidden).reshape(16, -1)

        out, pull = jax.vjp(logits, embedding)
        weight = jnp.linspace(0.5, 1.5, out.shape[1])
        pulled = jax.lax.map(lambda i: pull(jnp.zeros_like(out).at[i].set(weight))[0], jnp.arange(16))
        return jnp.max(jnp.abs(pulled[:, tokens.reshape(-1)]), axis=-1)  # [output place, input place]

    found = np.asarray(dependence(params["ends"]["embedding"])) != 0
    segment = np.asarray(segment_ids).reshape(-1) + 10 * np.repeat([0, 1], 8)
    place = np.arange(16)
    allowed = (segment[:, None] == segment[None]) & (place[:, None] >= place[None])
    valid = np.asarray(segment_ids).reshape(-1) != 0
    np.testing.assert_array_equal(found[valid], allowed[valid])


def test_packed_rows_equal_separate_rows(tiny, params_of, forward, batch):
    model = tiny(**MOE)
    tokens, segment_ids = batch
    packed, packed_routing = forward(model, params_of(model), tokens, segment_ids)
    alone = jnp.zeros((2, 8), tokens.dtype).at[0, :3].set(tokens[0, :3]).at[1, :4].set(tokens[0, 3:7])
    lengths = jnp.array([[3], [4]])
    logits, routing = forward(model, params_of(model), alone, (jnp.arange(8)[None] < lengths).astype(int))
    for row, start, length in ((0, 0, 3), (1, 3, 4)):
        np.testing.assert_allclose(packed[0, start : start + length], logits[row, :length], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(
            packed_routing.experts[:, 0, start : start + length], routing.experts[:, row, :length]
        )


def test_positions_restart_with_each_segment():
    segment_ids = jnp.array([[1, 1, 1, 2, 2, 0, 0], [5, 3, 3, 3, 3, 3, 3]])
    np.testing.assert_array_equal(positions_of(segment_ids), [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 5]])


@functools.partial(jax.jit, static_argnames=("model",))
def _prefill(model, params, tokens, segment_ids):
    cache = kv_cache.empty(model.config, *tokens.shape)
    out = model.apply(params, tokens, segment_ids=segment_ids, cache=cache)
    return model.logits(params, out.hidden), out.routing, out.cache


@functools.partial(jax.jit, static_argnames=("model",))
def _step(model, params, tokens, positions, cache):
    out = model.apply(params, tokens[:, None], positions=positions[:, None], cache=cache)
    return model.logits(params, out.hidden)[:, 0], out.routing, out.cache


def test_decoding_equals_teacher_forcing(tiny, params_of, forward):
    """Prompts of 1, 3 and 4 tokens in one batch; columns behind a prompt hold what the prefill left there.

    The prefill runs on stacked parameters, the decode loop on the same ones unstacked.
    """
    model = tiny(**MIXED)
    params = params_of(model)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 24, (3, 8)))
    expected, expected_routing = forward(model, params, tokens)
    lengths = np.array([1, 3, 4])
    segment_ids = (np.arange(8)[None] < lengths[:, None]).astype(int)
    logits, routing, cache = _prefill(model, params, jnp.where(segment_ids, tokens, 23), jnp.asarray(segment_ids))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :length], expected[row, :length], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(routing.experts[:, row, :length], expected_routing.experts[:, row, :length])
    params = model.unstack(params)
    for step in range(4):
        at = lengths + step
        logits, routing, cache = _step(model, params, tokens[np.arange(3), at], jnp.asarray(at), cache)
        np.testing.assert_allclose(logits, expected[np.arange(3), at], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(routing.experts[:, :, 0], expected_routing.experts[:, np.arange(3), at])


def test_unstacked_parameters_give_the_same(tiny, params_of, forward, batch):
    model = tiny(**MIXED)
    params = params_of(model)
    unstacked = model.unstack(params)
    assert (len(unstacked["dense"]), len(unstacked["moe"])) == (3, 1)
    np.testing.assert_allclose(
        forward(model, unstacked, *batch)[0], forward(model, params, *batch)[0], rtol=1e-6, atol=1e-6
    )
    cast = model.unstack(params, jnp.bfloat16)
    kept = {
        jax.tree_util.keystr(path) for path, x in jax.tree_util.tree_leaves_with_path(cast) if x.dtype == jnp.float32
    }
    every = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(cast)}
    assert kept == {path for path in every if "router" in path or "norm" in path}


@pytest.mark.parametrize(("rows", "first"), [(8, True), (FEW_ROWS, True), (FEW_ROWS + 1, False)])
def test_few_rows_are_multiplied_by_a_transposed_weight_from_the_right(rows, first):
    """XLA would swap the operands of a product that is transposed afterwards, and lose what the form wins."""
    x, w = jax.random.normal(jax.random.key(0), (rows, 48)), jax.random.normal(jax.random.key(1), (48, 40))
    run = jax.jit(lambda x, kept: project(x, Transposed(kept))).lower(x, w.T).compile()
    np.testing.assert_allclose(run(x, w.T), x @ w, atol=1e-5)
    assert (f"f32[40,{rows}]" in run.as_text()) == first


def test_bfloat16_leaves_parameters_router_and_logits_in_float32(tiny, params_of, forward, batch):
    model = tiny(**MOE, dtype="bfloat16")
    params = params_of(model)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    hidden = jax.eval_shape(lambda p: model.apply(p, batch[0]).hidden, params)
    assert hidden.dtype == jnp.bfloat16
    logits, routing = forward(model, params, *batch)
    for x in (logits, routing.logits):
        assert x.dtype == jnp.float32
        assert np.any(np.asarray(x) != np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32)))  # nor rounded on the way
    # The rounding of bfloat16, 2^-8 relative, over two layers and a head: far from the float32 forward it is not.
    exact, _ = forward(tiny(**MOE), params, batch[0], batch[1], Routing(experts=routing.experts))
    valid = np.asarray(batch[1]) != 0
    assert np.max(np.abs(np.asarray(logits - exact))[valid]) < 0.05 * np.max(np.abs(np.asarray(exact)[valid]))


def test_neither_rematerialisation_nor_a_loop_changes_a_gradient(tiny, params_of, batch, monkeypatch):
    base = tiny(**MOE | {"num_hidden_layers": 3}, mlp_only_layers=(0,))
    params = params_of(base)
    found = {}
    for remat, loop in (("none", False), ("block", True), ("dots", True), ("dots", False)):
        model = dataclasses.replace(base, config=dataclasses.replace(base.config, remat=remat))
        monkeypatch.setattr(transformer, "in_a_loop", lambda *_, loop=loop: loop)

        def loss(params, model=model):
            return jnp.mean(
                jnp.square(model.logits(params, model.apply(params, batch[0], segment_ids=batch[1]).hidden))
            )

        found[remat, loop] = jax.jit(jax.grad(loss))(params)
    expected, *others = found.values()
    assert all(np.any(np.asarray(x)) for x in jax.tree.leaves(expected))
    for other in others:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), expected, other)


def test_where_layers_are_trained_in_a_loop(tiny, monkeypatch):
    """On a GPU also with dots, and not where weights lie in slices, which XLA would keep gathered."""

    def unrolled(platform, mesh, layers):
        monkeypatch.setattr(sharding, "platform", lambda _: platform)
        configs = [tiny(remat=remat).config for remat in ("none", "block", "dots")]
        return [c.remat for c in configs if not in_a_loop(c, mesh, layers)]

    assert unrolled("cpu", None, 8) == ["none"]
    assert unrolled("gpu", None, 48) == unrolled("gpu", sharding.make_mesh((4, 1, 1, 1)), 48) == ["none", "dots"]
    sliced = sharding.make_mesh((2, 2, 1, 1))
    for case in (("cpu", None, 9), ("gpu", None, 49), ("gpu", sliced, 2), ("tpu", None, 2)):
        assert unrolled(*case) == []


@pytest.mark.slow
def test_rematerialisation_lowers_memory(tiny):
    """Temporary bytes of the compiled gradient: it keeps four layers' intermediates, their products, or what each layer
    starts from. All hold those of the one layer that is computed again (2.0 of 5.8 MB)."""

    def temporary(remat):
        model = tiny(num_hidden_layers=4, remat=remat)
        shapes = jax.eval_shape(model.init, jax.random.key(0)), jax.ShapeDtypeStruct((8, 64), jnp.int32)
        gradient = jax.grad(lambda params, tokens: jnp.sum(model.apply(params, tokens).hidden))
        return jax.jit(gradient).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    none, dots, block = (temporary(remat) for remat in ("none", "dots", "block"))
    assert block < 0.5 * none
    assert block < dots < none


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        (1, 4, 1, 1),  # every matrix has the model's width
        (1, 1, 4, 1),  # the width is cut over the expert axis too
        (1, 1, 2, 2),
    ],
    ids=["fsdp", "expert", "expert-tensor"],
)
def test_parameters_are_born_sharded(tiny, forward, batch, shape):
    """Whole on every device is only what has no axis of this mesh; values and logits are those of one device."""
    changes = dict(**MOE, mlp_only_layers=(0,))
    model, alone = tiny(sharding.make_mesh(shape), **changes), tiny(**changes)
    params, expected = model.init_sharded(jax.random.key(3)), alone.init_sharded(jax.random.key(3))
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    for path, x in leaves.items():
        assert x.sharding.is_fully_replicated is ("norm" in path), path
        assert {shard.data.size < x.size for shard in x.addressable_shards} == {not x.sharding.is_fully_replicated}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), params, expected)
    logits, _ = forward(model, params, *batch)
    np.testing.assert_allclose(logits, forward(alone, expected, *batch)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shape", first_quick(2, [(1, 4, 1, 1), (1, 1, 2, 2), (2, 2, 1, 1), (1, 1, 1, 4), (1, 2, 1, 1, 2)]), ids=str
)
@pytest.mark.parametrize("vocabulary", [8, 10])
@pytest.mark.parametrize("axes", [sharding.MICRO_BATCH, sharding.ROLLOUT], ids=["micro-batch", "rollout"])
def test_embeddings_on_a_mesh(shape, vocabulary, axes):
    """Rows of the whole table and their gradient, where it is cut by width, by vocabulary or (10 over 4) not at all."""
    mesh = sharding.make_mesh(shape)
    table, cotangent = (jax.random.normal(jax.random.key(i), n) for i, n in enumerate([(vocabulary, 8), (4, 6, 8)]))
    tokens = jax.random.randint(jax.random.key(2), (4, 6), 0, vocabulary)

    @functools.partial(jax.jit, static_argnums=1)
    def run(table, mesh):
        x, pull = jax.vjp(lambda table: embedded(table, tokens, jnp.float32, axes, mesh), table)
        return x, pull(cotangent)[0]

    for found, wanted in zip(run(table, mesh), run(table, None), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_embeddings_is_summed_in_slices():
    """Over data 2 x fsdp 2: width for tokens and back by all-to-all, and each slice [v d/2] summed over data."""
    mesh, (v, d, b, t) = sharding.make_mesh((2, 2, 1, 1)), (64, 16, 4, 6)
    where = sharding.shardings([("vocab", "embed")], [jax.ShapeDtypeStruct((v, d), jnp.float32)], mesh)[0]
    table = jax.ShapeDtypeStruct((v, d), jnp.float32, sharding=where)
    tokens = jax.ShapeDtypeStruct((b, t), jnp.int32, sharding=sharding.micro_batch(mesh))

    def loss(table, tokens):
        return jnp.sum(embedded(table, tokens, jnp.float32, sharding.MICRO_BATCH, mesh) ** 2)

    gradient = jax.jit(jax.grad(loss), out_shardings=where)
    once, _ = measure(parse(gradient.lower(table, tokens).compile().as_text()), mesh.size)
    of_slice, of_tokens = 4 * v * d / 2, 4 * (2 * b * t / 4) * d / 2
    assert once.collectives["all-reduce"] == (1.0, 2 * of_slice / 2)
    assert once.collectives["all-to-all"] == (2.0, 2 * of_tokens / 2)
    assert set(once.collectives) == {"all-reduce", "all-to-all", "all-gather"}
    assert once.collectives["all-gather"][1] <= 2 * 4 * b * t / 4  # tokens


def test_axes_name_every_dimension(tiny):
    model = tiny(**MIXED)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    ranks = jax.tree.map(len, model.axes(), is_leaf=lambda a: isinstance(a, tuple))
    assert ranks == jax.tree.map(lambda s: s.ndim, shapes)


def test_fresh_parameters_lie_as_their_shapes_say(tiny):
    model = tiny(sharding.make_mesh((1, 4, 1, 1)))
    params, shapes = model.init_sharded(jax.random.key(0)), model.shapes()
    assert all(
        jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s.sharding, x.ndim), params, shapes))
    )


def test_routing_for_a_dense_model_is_an_error(tiny, params_of, batch):
    model = tiny()
    with pytest.raises(ValueError, match=r"dense model.*replay\.mode"):
        model.apply(params_of(model), batch[0], routing=Routing(experts=jnp.zeros((2, 2, 8, 2), jnp.uint8)))


@pytest.mark.parametrize("shape", [(1, 2, 8, 2), (2, 2, 7, 2), (2, 2, 8, 1)], ids=["layers", "time", "slots"])
def test_routing_of_another_shape_is_an_error(tiny, params_of, batch, shape):
    model = tiny(**MOE)
    with pytest.raises(ValueError, match=r"routing\.experts has shape .* this forward needs \(2, 2, 8, 2\)"):
        model.apply(params_of(model), batch[0], routing=Routing(experts=jnp.zeros(shape, jnp.uint8)))


def test_router_logits_of_another_shape_are_an_error(tiny, params_of, batch):
    model = tiny(**MOE)
    routing = Routing(experts=jnp.zeros((2, 2, 8, 2), jnp.uint8), logits=jnp.zeros((2, 2, 8, 3)))
    with pytest.raises(ValueError, match=r"routing\.logits has shape .* this forward needs \(2, 2, 8, 4\)"):
        model.apply(params_of(model), batch[0], routing=routing)
