"""The kernel that reads a cache as far as it is filled, run as plain JAX: it is plain attention over these columns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import Model, ModelConfig
from jaxrl_llm.models.attention import attend, flash_decode, kv_cache
from jaxrl_llm.models.attention.grouped_query import positions_of

CONFIG = ModelConfig(
    vocab_size=11,
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=0,
)
ROWS, LENGTH, PROMPT = 4, 512, 7
attend_filled = jax.jit(functools.partial(flash_decode.attend_filled, interpret=True))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_only_bfloat16_on_a_gpu_has_the_layout_of_the_kernel(monkeypatch):
    half = functools.partial(dataclasses.replace, CONFIG, dtype="bfloat16")
    assert kv_cache.layout_of(half(), "gpu") == kv_cache.FILLED
    for config in (half(head_dim=80), half(attention_implementation="plain"), CONFIG):
        assert kv_cache.layout_of(config, "gpu") == kv_cache.WHOLE
    assert kv_cache.layout_of(half(), "cpu") == kv_cache.STRETCHES
    assert kv_cache.layout_of(half(), "tpu") == kv_cache.STACKED
    assert kv_cache.layout_of(CONFIG, "tpu") == kv_cache.STRETCHES
    monkeypatch.setattr(kv_cache, "KERNEL", "jax.experimental.pallas.ops.gpu.none")
    assert kv_cache.layout_of(half(), "gpu") == kv_cache.WHOLE, "a JAX that has removed the kernel"
    cache = kv_cache.empty(CONFIG, ROWS, 300, kv_cache.FILLED)
    assert cache.keys[0][0].shape == cache.values[0][0].shape == (ROWS, 2, 512, 16)


@pytest.mark.parametrize("prompts", [0, 2])
def test_attention_over_what_is_filled(prompts):
    """Rows filled to 1, 128, 300 and 512 columns, alone and behind two prompts of 3 and 7 tokens for two rows each."""
    filled = jnp.array([1, 128, 300, LENGTH])
    q, keys, values = normal(0, ROWS, 1, 4, 16), normal(1, ROWS, 2, LENGTH, 16), normal(2, ROWS, 2, LENGTH, 16)
    visible = jnp.arange(LENGTH)[None, None] < filled[:, None, None]
    unread = jnp.where(visible[:, 0, None, :, None], values, 1e9)  # what is not filled does not matter
    if not prompts:
        found = attend_filled(q, (keys,), (unread,), visible, filled)
    else:
        before, of_prompt = normal(3, prompts, 2, PROMPT, 16), normal(4, prompts, 2, PROMPT, 16)
        of_row = [jnp.repeat(x, ROWS // prompts, axis=0) for x in (before, of_prompt)]
        seen = jnp.arange(PROMPT)[None, None] < jnp.array([3, 3, 7, 7])[:, None, None]
        visible = jnp.concatenate([seen, visible], axis=-1)
        found = attend_filled(q, (before, keys), (of_prompt, unread), visible, filled)
        keys, values = (jnp.concatenate(x, axis=2) for x in ((of_row[0], keys), (of_row[1], values)))
    np.testing.assert_allclose(found, attend.attend(q, keys, values, visible), atol=2e-6)


def test_decoding_by_the_kernel_is_the_full_forward(monkeypatch):
    """Prompts are prefilled, copied into a cache and continued token by token."""
    monkeypatch.setattr(kv_cache, "layout_of", lambda *_: kv_cache.FILLED)
    interpreted = functools.partial(flash_decode.attend_filled, interpret=True)
    monkeypatch.setattr(flash_decode, "attend_filled", interpreted)
    model = Model(CONFIG)
    params, apply = model.unstack(model.init(jax.random.key(0))), jax.jit(model.apply, static_argnames="prefill")
    tokens, width = jax.random.randint(jax.random.key(1), (2, 9), 0, 11), 6
    expected = apply(params, tokens).hidden
    prompts = apply(params, tokens[:, :width], prefill=True)
    rows = jnp.arange(2)
    cache = kv_cache.copy_rows(model.empty_cache(2, 20), rows, prompts.cache, rows, width, model.cache_layout)
    positions = positions_of(jnp.ones_like(tokens))
    for t in range(width, 9):
        out = apply(params, tokens[:, t : t + 1], positions=positions[:, t : t + 1], cache=cache)
        cache = out.cache
        np.testing.assert_allclose(out.hidden[:, 0], expected[:, t], atol=2e-5)
