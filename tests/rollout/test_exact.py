"""model.numerics=exact: a token has the same bits however it is computed. Every comparison is of bits."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import Model, Routing
from jaxrl_llm.models.exact import exact_block, exact_scores, tiles
from jaxrl_llm.models.kernels import Kernels
from jaxrl_llm.models.lora import LoRAConfig, attach, init_adapters, merged
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from tests.reference.exact_rollouts import (
    ANSWER,
    END,
    GROUP,
    PROMPTS,
    WIDTH,
    assert_same,
    cases,
    config,
    in_gradient,
    in_parts,
    parameters,
    prompts,
    rollout,
    sampled,
    scored,
)

# What families change: a gate with a bias and groups, a shared expert behind a gate, factors, biases, tied embeddings.
OTHER = {
    "scoring_func": "sigmoid",
    "selection_bias": True,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "shared_expert_intermediate_size": 32,
    "shared_expert_gate": True,
    "qk_norm": "full",
    "attention_bias": True,
    "attention_multiplier": 0.2,
    "partial_rotary_factor": 0.5,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 1.5,
    "tie_word_embeddings": True,
}


# Layers that differ: windows, sinks, RoPE of neighbours with YaRN in one of them, and a bias of o.
VIEWS = {
    "sliding_window": 5,
    "layer_types": ("sliding_attention", "full_attention"),
    "no_rope_layers": (1,),
    "attention_sinks": True,
    "attention_output_bias": True,
    "rope_interleave": True,
    "rope_type": "yarn",
    "rope_scaling": (8.0, 16.0, 32.0, 1.0, 0.0, 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [OTHER, VIEWS], ids=["gates", "views"])
def test_what_other_families_compute(fields):
    model = Model(config("bfloat16", decoder_sparse_step=2, **fields))
    params, of = parameters(model), rollout(model, slots=8)
    assert_same(of, *scored(model, params, of.tokens, of.segment_ids))
    in_float32 = dataclasses.replace(model.config, dtype="float32")
    fast = Model(dataclasses.replace(in_float32, numerics="fast"))
    logprobs, plain = (scored(m, params, of.tokens, of.segment_ids)[0] for m in (Model(in_float32), fast))
    np.testing.assert_allclose(logprobs, plain, atol=2e-5)


@cases("float32")
def test_whole_rows_micro_batches_and_a_gradient(dtype, experts, seeds):
    model = Model(config(dtype, experts))
    fast = Model(dataclasses.replace(model.config, numerics="fast"))
    for seed in range(seeds):
        params, of = parameters(model, seed), rollout(model, seed, slots=8)
        assert_same(of, *scored(model, params, of.tokens, of.segment_ids))
        assert_same(of, *in_parts(model, params, of, 4))
        gradient, found = in_gradient(model, params, of)
        assert_same(of, *found)
        if dtype == "float32":  # the gradient is that of the fast model, to rounding
            plain, _ = in_gradient(fast, params, of)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4 * float(jnp.max(jnp.abs(b)))), gradient, plain
            )


@cases()
def test_rows_of_any_number_and_width(dtype, experts, seeds):
    model = Model(config(dtype, experts))
    for seed in range(seeds):
        params, of = parameters(model, seed), rollout(model, seed, slots=8)
        for rows in (1, 5):
            assert_same(of, *in_parts(model, params, of, rows))
        assert_same(of, *scored(model, params, of.tokens, of.segment_ids, rows="padded"))
        wide = (np.pad(a, ((0, 0), (0, 12))) for a in (of.tokens, of.segment_ids))
        logprobs, routes = scored(model, params, *wide)
        assert_same(of, logprobs[:, :-12], None if routes is None else routes[:, :, :-12])


@cases("bfloat16")
def test_slots_that_are_refilled_and_prompts_of_another_width(dtype, experts, seeds):
    model = Model(config(dtype, experts))
    for seed in range(seeds):
        of = rollout(model, seed, slots=8)
        for fields in ({"slots": 3}, {"slots": 0, "width": 2 * WIDTH})[:seeds]:
            other = rollout(model, seed, **fields)
            length = of.tokens.shape[1]
            np.testing.assert_array_equal(of.tokens, other.tokens[:, :length])
            experts_there = None if other.experts is None else other.experts[:, :, :length]
            assert_same(of, other.sampler_logprobs[:, :length], experts_there)


@cases("bfloat16")
def test_rows_of_several_answers(dtype, experts, seeds):
    """Packed side by side, and behind a prompt that they share."""
    model = Model(config(dtype, experts))
    for seed in range(seeds):
        params, of = parameters(model, seed), rollout(model, seed, slots=8)
        for shared in (False, True):
            tokens, segments, pieces = side_by_side(of, prompts(seed)[1] if shared else np.zeros(PROMPTS, int))
            out, routes = map(
                np.asarray, scored(model, params, tokens, segments, rows="shared" if shared else "packed")
            )
            logprobs = np.zeros_like(of.sampler_logprobs)
            found = None if of.experts is None else np.full_like(of.experts, 255)
            for answer, row, at, start, end in pieces:
                logprobs[answer, start:end] = out[row, at : at + end - start]
                if found is not None:
                    found[:, answer, start:end] = routes[:, row, at : at + end - start]
            assert_same(of, logprobs, found)


def side_by_side(of, starts):
    """A row for each group, whose answers share its first tokens; and where the pieces of an answer lie: answer, row,
    column, and the columns of the answer."""
    lengths, shape = of.segment_ids.sum(1), (PROMPTS, GROUP * of.tokens.shape[1])
    tokens, segments, pieces = np.zeros(shape, np.int32), np.zeros(shape, np.int32), []
    for row, start in enumerate(starts):
        tokens[row, :start], segments[row, :start], at = of.tokens[row * GROUP, :start], 1, start
        for number, answer in enumerate(range(row * GROUP, (row + 1) * GROUP), start=1 + (start > 0)):
            end = lengths[answer]
            tokens[row, at : at + end - start] = of.tokens[answer, start:end]
            segments[row, at : at + end - start] = number
            pieces += [(answer, row, 0, 0, start), (answer, row, at, start, end)]
            at += end - start
    return tokens, segments, pieces


@pytest.mark.slow
@pytest.mark.parametrize(
    "cuts",
    [{"top_k": 8, "top_p": 0.9}, {"top_k": 6}, {}],
    ids=["top p", "top k", "all"],
)
@cases("float32")
def test_a_temperature_and_the_tokens_that_were_kept(dtype, experts, seeds, cuts):
    model = Model(config(dtype, experts))
    for seed in range(seeds):
        of = rollout(model, seed, slots=8, temperature=0.7, record_kept=bool(cuts), **cuts)
        assert not cuts or (np.asarray(of.kept)[of.loss_mask] >= 0).any()
        how = {"kept": of.kept, "temperature": 0.7}
        assert_same(of, *scored(model, parameters(model, seed), of.tokens, of.segment_ids, **how))


@cases("bfloat16", models=(8,))
def test_a_replay_of_its_own_routing_changes_no_bit(dtype, experts, seeds):
    """By logits, and by indices alone."""
    model = Model(config(dtype, experts))
    for seed in range(seeds):
        of = rollout(model, seed, slots=8, record_router_logits=True)
        for record in (of.routing, Routing(of.routing.experts))[:seeds]:
            assert_same(of, *scored(model, parameters(model, seed), of.tokens, of.segment_ids, routing=record))


def test_the_gradient_is_that_of_the_experts_of_the_forward():
    """In bfloat16 another forward of the same tokens changes experts, and with them the gradient. The gradient agrees
    with that of the fast model when this replays the exact forward's experts, and not when it chooses again."""
    model = Model(config("bfloat16"))
    fast = Model(dataclasses.replace(model.config, numerics="fast"))
    params, of = parameters(model), rollout(model, slots=8)

    def apart(experts):
        other, _ = in_gradient(fast, params, of, Routing(experts))
        return optax.tree.norm(jax.tree.map(jnp.subtract, exact, other)) / optax.tree.norm(exact)

    exact, (_, used) = in_gradient(model, params, of)
    replayed, chosen = apart(used), apart(jnp.full_like(used, 255))  # 255: of no record
    assert replayed < 0.05 < chosen


def test_another_platform_is_refused(monkeypatch):
    monkeypatch.setattr(sharding, "platform", lambda mesh: "gpu")
    with pytest.raises(ValueError, match=r"model\.numerics=exact has kernels for cpu and tpu, and this is gpu; set"):
        Kernels.of(config(), None)


@cases()
def test_what_the_backward_computes_again(dtype, experts, seeds):
    model = Model(config(dtype, experts))
    for seed in range(seeds):
        of = rollout(model, seed, slots=8)
        for remat in ("block", "dots"):
            other = Model(dataclasses.replace(model.config, remat=remat))
            assert_same(of, *in_gradient(other, parameters(model, seed), of)[1])


@pytest.mark.parametrize("shape", [None, pytest.param((1, 2, 2, 1), marks=pytest.mark.slow)], ids=["one", "mesh"])
@cases()
def test_adapters_merged_and_apart(dtype, experts, seeds, shape):
    model = Model(config(dtype, experts), shape and sharding.make_mesh(shape))
    engine = Engine(model, Sampling(), GROUP, ANSWER, (END,), slots=8, dtype=dtype)
    adapters = init_adapters(LoRAConfig(rank=2, targets="attention,mlp"), model, jax.random.key(3))
    adapters = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), adapters)
    with jax.set_mesh(model.mesh) if shape else contextlib.nullcontext():
        for seed in range(seeds):
            base = parameters(model, seed)
            of = sampled(engine, merged(model, base, adapters, 2.0), seed)
            assert_same(of, *scored(model, attach(base, adapters, 2.0), of.tokens, of.segment_ids))


@pytest.mark.parametrize(
    ("module", "part", "named", "width"),
    [
        (tiles, "of_slots", "experts of layer 0", 40),
        pytest.param(exact_block, "rotate", "norm, q, k, v and RoPE of layer 0", 48, marks=pytest.mark.slow),
        pytest.param(exact_scores, "exact_logits", "the head and its log-softmax", 56, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_tile_is_named(monkeypatch, module, part, named, width):
    """One that reads how many rows there are: a device of 3 rows a step, and 34 tokens a row, in turn."""
    right = getattr(module, part)
    model = Model(config(num_hidden_layers=1, hidden_size=width, head_dim=width // 4))  # no other test's programs

    def wrong(x, *rest):
        out = right(x, *rest)
        return jax.tree.map(
            lambda y: y + jnp.float32(2**-12) * (jnp.arange(len(y)) > 5).reshape(-1, *[1] * (y.ndim - 1)), out
        )

    monkeypatch.setattr(module, part, wrong)
    assert named in model.first_difference()


def test_no_operation_differs():
    assert "agree in every operation" in Model(config(num_hidden_layers=1)).first_difference()
