"""The kernels of exact numerics on a TPU, run as plain JAX: a row's bits, however many rows there are and wherever it
stands, and its distance from numbers in float64."""

import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import Model, ModelConfig, kernels, score
from jaxrl_llm.models.exact.exact_kernels import KernelTiles
from jaxrl_llm.plan.chips import lowering_for, topology_devices
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from tests.reference.slowly import first_quick

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPUs is optional: pip install 'jax[tpu]'"
)
HOW = KernelTiles(interpret=True)
N, D, F = 70, 64, 600  # rows of one block; columns of more than one


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


def assert_same_rows(run, *rows):
    """The rows among themselves: some of them, in another order, and behind others in a block and a half more."""
    whole = jax.jit(run)(*rows)
    order = np.random.default_rng(9).permutation(len(rows[0]))
    few, turned = order[:3], np.concatenate([np.zeros(133, int), order])
    for at in (few, turned):
        np.testing.assert_array_equal(bits(jax.jit(run)(*(x[at] for x in rows))), bits(whole)[at])
    return np.asarray(whole, np.float64)


@pytest.mark.parametrize("dtype", first_quick(1, ["bfloat16", "float32"]))
def test_products(dtype):
    x, w = (np.asarray(jnp.asarray(a, dtype), np.float32) for a in (normal(0, N, D), normal(1, D, F)))
    weight = HOW.held(jnp.asarray(w), dtype)
    run = functools.partial(HOW.in_tiles, lambda x: HOW.product(x, weight, "float32"))
    found, wanted = assert_same_rows(run, x), x.astype(np.float64) @ w
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    assert weight.dtype == dtype


def test_a_product_longer_than_a_block():
    """1152 = 9 x 128 places, summed one block after the other."""
    x, w = normal(0, 5, 1152), normal(1, 1152, 8)
    found = assert_same_rows(functools.partial(HOW.in_tiles, lambda x: HOW.product(x, jnp.asarray(w), "float32")), x)
    np.testing.assert_allclose(found, x.astype(np.float64) @ w, atol=2e-4)


def test_rows_by_themselves():
    x, scale = normal(0, N, 3, D), normal(1, D)

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    shared = jnp.asarray(scale)[None, None]
    found = assert_same_rows(functools.partial(HOW.in_tiles, lambda x: HOW.by_row(norm, (x,), shared)), x)
    of = x.astype(np.float64)
    np.testing.assert_allclose(found, of / np.sqrt((of**2).mean(-1, keepdims=True) + 1e-6) * scale, rtol=2e-6)


@pytest.mark.parametrize("kept", first_quick(1, [7, 0]))
def test_a_softmax_over_several_blocks(kept):
    """5000 logits are three blocks; the last is not whole. kept: all others are taken out."""
    x = 5 * normal(0, 20, 5000)
    x[:, kept or 5000 :] = -np.inf

    def both(x):
        logprob, entropy, log_partition = HOW.log_softmax(x, x[:, 0])
        return jnp.stack([logprob, log_partition, log_partition - entropy], axis=1)

    found = assert_same_rows(functools.partial(HOW.in_tiles, both), x)
    of = x[:, : kept or 5000].astype(np.float64)
    log_partition = np.log(np.exp(of).sum(1))
    mean = (np.exp(of - log_partition[:, None]) * of).sum(1)
    wanted = np.stack([of[:, 0] - log_partition, log_partition, mean], axis=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_experts():
    """Of a skewed load, with an expert of more than one block and one of none."""
    x, weights = normal(0, 200, D), tuple(normal(i, 4, *s) / 8 for i, s in enumerate([(D, 32), (D, 32), (32, D)], 1))
    experts = np.stack([np.zeros(200, int), np.random.default_rng(2).integers(1, 3, 200)], axis=1)
    run = functools.partial(HOW.experts, weights=tuple(map(jnp.asarray, weights)), dtype="float32")
    found = assert_same_rows(run, x, experts)
    of = x.astype(np.float64)
    for slot in range(2):
        gate, up, down = (w[experts[:, slot]].astype(np.float64) for w in weights)
        a, b = (np.einsum("nd,ndf->nf", of, w) for w in (gate, up))
        wanted = np.einsum("nf,nfd->nd", a / (1 + np.exp(-a)) * b, down)
        np.testing.assert_allclose(found[:, slot], wanted, atol=1e-5)


def attended(q, k, v):
    """Causal attention of one segment in float64: q [t h d], k and v [t kv d]."""
    t, h, d = q.shape
    k, v = (np.repeat(a.astype(np.float64), h // a.shape[1], axis=1) for a in (k, v))
    scores = np.where(np.tril(np.ones((t, t), bool))[None], np.einsum("thd,shd->hts", q, k) / d**0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v).reshape(t, -1)


def test_attention_by_position():
    """A segment of two blocks of columns: alone, behind another one in its row, token by token from a cache, and as an
    answer behind a prompt that another answer shares."""
    t, prompt, other, h, kv, d = 150, 140, 21, 6, 2, 16
    q, k, v = normal(0, t, h, d), normal(1, t, kv, d), normal(2, t, kv, d)
    attend = jax.jit(HOW.attend)

    def rows(q, k, v, first, shared, count):
        keys, values = (jnp.asarray(np.swapaxes(a, 0, 1)[None]) for a in (k, v))
        places = [None if a is None else jnp.asarray(a, jnp.int32)[None] for a in (first, shared, count)]
        return np.asarray(attend(jnp.asarray(q), keys, values, *places))

    own = np.arange(t) + 1
    alone = rows(q, k, v, np.zeros(t), None, own)
    np.testing.assert_allclose(alone, attended(q.astype(np.float64), k, v), atol=2e-6)
    before = [normal(3, other, *a.shape[1:]) for a in (q, k, v)]
    packed = [np.concatenate(pair) for pair in zip(before, (q, k, v), strict=True)]
    first = np.repeat([0, other], [other, t])
    np.testing.assert_array_equal(rows(*packed, first, None, [*range(1, other + 1), *own])[other:], alone)
    shared = [np.concatenate([a[:prompt], b, a[prompt:]]) for a, b in zip((q, k, v), before, strict=True)]
    first = np.repeat([0, 0, other], [prompt, other, t - prompt])
    of_prompt = np.repeat([0, prompt], [prompt, other + t - prompt])
    count = [*own[:prompt], *range(prompt + 1, prompt + other + 1), *own[prompt:]]
    found = rows(*shared, first, of_prompt, count)
    np.testing.assert_array_equal(found[:prompt], alone[:prompt])
    np.testing.assert_array_equal(found[prompt + other :], alone[prompt:])
    steps = [0, 127, 128, 149]
    cache = [jnp.asarray(np.repeat(np.swapaxes(np.pad(a, ((0, 9), (0, 0), (0, 0))), 0, 1)[None], 4, 0)) for a in (k, v)]
    stepwise = attend(jnp.asarray(q[steps]), *cache, None, None, jnp.asarray(steps)[:, None] + 1)
    np.testing.assert_array_equal(np.asarray(stepwise), alone[steps])


@pytest.fixture
def interpreted(monkeypatch):
    """Exact numerics by the kernels, interpreted."""
    monkeypatch.setattr(kernels, "_EXACT", {"cpu": types.SimpleNamespace(of=lambda config: HOW)})


def config(dtype, experts=4, **fields):
    """One that no other test has, whose programs would be found compiled."""
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 3e-6}
    mixture = {"num_experts": experts, "num_experts_per_tok": 2 if experts else 1, "moe_intermediate_size": 24}
    return ModelConfig(**sizes | heads | mixture | fields, dtype=dtype, numerics="exact")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("dtype", "experts"), [("bfloat16", 4), ("float32", 0)])
@pytest.mark.slow
def test_whole_rows_and_single_tokens(dtype, experts):
    assert "agree in every operation" in Model(config(dtype, experts)).first_difference()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.slow
def test_sampler_and_trainer():
    """Answers of two slots, scored as rows, in two micro-batches and inside a gradient; and near the fast model."""
    model, (prompts, width, group, new) = Model(config("bfloat16")), (3, 5, 4, 12)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(1, 40, (prompts, width)).astype(np.int32)
    lengths = np.asarray([5, 2, 4], np.int32)
    engine = Engine(model, Sampling(), group, new, (0,), slots=2, dtype="bfloat16")
    of = engine.generate(params, tokens, lengths, np.arange(prompts), jax.random.key(1))
    mask, sampled = np.asarray(of.loss_mask), np.asarray(of.sampler_logprobs)
    assert mask.sum() > 100

    @functools.partial(jax.jit, static_argnums=0)
    def scored(model, params, tokens, segment_ids):
        def loss(params):
            out = score(model, params, tokens, segment_ids)
            return jnp.sum(out.logprobs), out.logprobs

        return jax.grad(loss, has_aux=True)(params)[1], score(model, params, tokens, segment_ids).logprobs

    for rows in (12, 6):
        for at in range(0, 12, rows):
            here = slice(at, at + rows)
            for logprobs in scored(model, params, of.tokens[here], of.segment_ids[here]):
                np.testing.assert_array_equal(np.asarray(logprobs)[mask[here]], sampled[here][mask[here]])
    wide = dataclasses.replace(model.config, dtype="float32")
    both = [Model(c) for c in (wide, dataclasses.replace(wide, numerics="fast"))]
    exact, fast = (scored(m, params, of.tokens, of.segment_ids)[1] for m in both)
    np.testing.assert_allclose(exact, fast, atol=2e-5)


def test_parts_and_sizes_without_a_kernel():
    for field in ("attention_sinks", "rope_interleave"):
        with pytest.raises(ValueError, match=rf"no kernel for model\.{field}=True; set model\.numerics=fast"):
            KernelTiles.of(config("float32", **{field: True}))
    for field in ("hidden_size", "intermediate_size", "moe_intermediate_size"):
        with pytest.raises(ValueError, match=rf"multiple of 128, and model\.{field} is 1100; set model\.numerics=fast"):
            KernelTiles.of(config("float32", **{field: 1100}))
    keys = jax.ShapeDtypeStruct((1, 1, 2**15, 128), jnp.bfloat16)
    q, count = jax.ShapeDtypeStruct((1, 1, 128), jnp.float32), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    with pytest.raises(ValueError, match=r"of a row of 32768 tokens take 32; shorten the rows"):
        jax.eval_shape(lambda *x: HOW.attend(*x[:3], None, None, x[3]), q, keys, keys, count)


def compile_for(topology):
    """A score forward of shared prompts and a rollout: all products are the kernels', XLA is left none."""
    _, devices = topology_devices(topology)
    sizes = {"hidden_size": 1152, "head_dim": 64, "moe_intermediate_size": 256, "vocab_size": 5000}
    parts = {"attention_bias": True, "partial_rotary_factor": 0.5, "shared_expert_intermediate_size": 256}
    parts |= {"shared_expert_gate": True, "num_hidden_layers": 2, "attention_implementation": "plain"}
    model = Model(config("bfloat16", **sizes, **parts), sharding.make_mesh((4, 1, 1, 1), devices))
    of_rows = jax.ShapeDtypeStruct((8, 192), jnp.int32, sharding=sharding.micro_batch(model.mesh))
    engine = Engine(model, Sampling(), group_size=8, max_new_tokens=65, end_ids=(1,), dtype="bfloat16")
    with lowering_for(devices[0]):
        scored = jax.jit(functools.partial(score, model, rows="shared"))
        programs = scored.lower(model.shapes(), of_rows, of_rows), engine.trace(model.shapes(), 4, 128).lower()
    for program in programs:
        text = program.as_text()
        assert text.count("tpu_custom_call") > 10
        assert "dot_general" not in text
        program.compile()


@needs_libtpu
@pytest.mark.parametrize("topology", first_quick(1, ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"]))
def test_compiled_for_tpus(topology):
    """In a process of its own: libtpu ends one whose flags of a CPU it does not know."""
    code = f"from tests.models.test_exact_kernels import compile_for; compile_for({topology!r})"
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
