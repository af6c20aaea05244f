"""Rollouts under exact numerics, their scores in several forms, and the comparison of bits."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import ModelConfig, score
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling

END, PROMPTS, WIDTH, GROUP, ANSWER = 0, 6, 9, 4, 36  # rows of more than one block of 32 columns
EVERY = [(dtype, experts, 5) for dtype in ("float32", "bfloat16") for experts in (8, 0)]  # about 3,000 tokens each


def cases(dtype="", experts=8, models=(8, 0)):
    """A quick case of one seed, if a type is given, and slow ones of five seeds: mixture and dense, in both types."""
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case[1] in models]
    return pytest.mark.parametrize(("dtype", "experts", "seeds"), [(dtype, experts, 1)] * bool(dtype) + slow)


def config(dtype="float32", experts=8, **fields):
    """Widths at which XLA:CPU multiplies few rows by another kernel than many."""
    fields = {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2} | fields
    return ModelConfig(
        vocab_size=48,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=experts,
        num_experts_per_tok=2 if experts else 1,
        moe_intermediate_size=32,
        dtype=dtype,
        numerics="exact",
        **fields,
    )


def prompts(seed, width=WIDTH):
    rng = np.random.default_rng(seed)
    tokens, lengths = rng.integers(1, 48, (PROMPTS, WIDTH)), rng.integers(2, WIDTH + 1, PROMPTS)
    return np.pad(tokens.astype(np.int32), ((0, 0), (0, width - WIDTH))), lengths.astype(np.int32)


@functools.cache
def parameters(model, seed=0):
    """Experts that differ more than at initialisation, so that a flip would move log-probs."""
    params = model.init_sharded(jax.random.key(seed))
    return jax.tree.map(lambda x: x * 1.5 if x.ndim > 2 else x, params)


@functools.cache
def rollout(model, seed=0, width=WIDTH, **fields):
    """A rollout, NumPy in and out; width: of the padded prompts; fields of the engine."""
    sampling = Sampling(**{name: fields.pop(name) for name in ("temperature", "top_k", "top_p") if name in fields})
    engine = Engine(model, sampling, GROUP, ANSWER, (END,), dtype=model.config.dtype, **fields)
    return sampled(engine, parameters(model, seed), seed, width)


def sampled(engine, params, seed=0, width=WIDTH):
    out = engine.generate(params, *prompts(seed, width), np.arange(PROMPTS), jax.random.key(seed))
    routing = out.routes.sampled
    return SimpleNamespace(
        tokens=np.asarray(out.tokens),
        segment_ids=np.asarray(out.segment_ids),
        kept=out.kept,
        loss_mask=np.asarray(out.loss_mask),
        sampler_logprobs=np.asarray(out.sampler_logprobs),
        routing=routing,
        experts=None if routing is None else np.asarray(routing.experts),
    )


@functools.partial(jax.jit, static_argnums=0, static_argnames=("rows", "temperature"))
def scored(model, params, tokens, segment_ids, routing=None, kept=None, rows="packed", temperature=1.0):
    how = {"routing": routing, "kept": kept, "rows": rows, "temperature": temperature}
    out = score(model, params, tokens, segment_ids, **how)
    return out.logprobs, None if out.routing is None else out.routing.experts


def assert_same(of, logprobs, experts=None):
    """The log-probs of all answer tokens, and the experts of all tokens that were fed."""
    mask = of.loss_mask
    assert mask.sum() > 100
    np.testing.assert_array_equal(np.asarray(logprobs)[mask], of.sampler_logprobs[mask])
    if experts is not None:
        recorded = of.experts
        known = recorded[..., 0] != 255
        assert known[:, mask & np.roll(mask, -1, 1)].all()
        np.testing.assert_array_equal(np.asarray(experts)[known], recorded[known])


def in_parts(model, params, of, rows):
    parts = [
        scored(model, params, of.tokens[at : at + rows], of.segment_ids[at : at + rows]) for at in range(0, 24, rows)
    ]
    logprobs, experts = zip(*parts, strict=True)
    return np.concatenate(logprobs), None if experts[0] is None else np.concatenate(experts, axis=1)


def in_gradient(model, params, of, routing=None):
    """The gradient of the sum of all log-probs, and the log-probs and experts of the forward inside."""
    return _in_gradient(model, params, of.tokens, of.segment_ids, routing)


@functools.partial(jax.jit, static_argnums=0)
def _in_gradient(model, params, tokens, segment_ids, routing):
    def loss(params):
        out = score(model, params, tokens, segment_ids, routing=routing)
        return jnp.sum(out.logprobs), (out.logprobs, None if out.routing is None else out.routing.experts)

    return jax.grad(loss, has_aux=True)(params)
