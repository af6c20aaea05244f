"""A cache in stretches of columns is one cache: writing, copying rows and attending do not see the cuts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import ModelConfig, kv_cache
from jaxrl_llm.models.attention import attend, attend_cached

CONFIG = ModelConfig(vocab_size=4, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
ROWS, LENGTH = 3, 130


def whole(cache):
    return np.concatenate(cache.keys[0], axis=3), np.concatenate(cache.values[0], axis=2)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.fixture(scope="module")
def full():
    keys, values = normal(0, ROWS, LENGTH, 2, 8), normal(1, ROWS, LENGTH, 2, 8)
    cache = kv_cache.empty(CONFIG, ROWS, LENGTH)
    return kv_cache.KVCache(*((x,) for x in kv_cache.write(*layer(cache), keys, values, jnp.zeros(ROWS, jnp.int32))))


def layer(cache):
    return cache.keys[0], cache.values[0]


def test_stretches_cover_the_length_and_are_few():
    for length, sizes in ((1, [1]), (64, [64]), (130, [64, 64, 2]), (1000, [125] * 8)):
        cache = kv_cache.empty(CONFIG, ROWS, length)
        assert [x.shape[2] for x in cache.values[0]] == sizes
        assert [x.shape[3] for x in cache.keys[0]] == sizes
        assert cache.length == length


@pytest.mark.parametrize("t", [1, 5])
def test_each_row_is_written_from_its_own_column(full, t):
    column = np.array([0, 62, LENGTH - t], np.int32)
    new_keys, new_values = normal(2, ROWS, t, 2, 8), normal(3, ROWS, t, 2, 8)
    written = kv_cache.write(*layer(full), new_keys, new_values, jnp.asarray(column))
    keys, values = (x.copy() for x in whole(full))
    for row, c in enumerate(column):
        keys[row, :, :, c : c + t] = np.asarray(new_keys)[row].transpose(1, 2, 0)
        values[row, :, c : c + t] = np.asarray(new_values)[row].transpose(1, 0, 2)
    np.testing.assert_array_equal(np.concatenate(written[0], axis=3), keys)
    np.testing.assert_array_equal(np.concatenate(written[1], axis=2), values)


def test_copied_rows_fill_the_first_columns(full):
    target = kv_cache.empty(CONFIG, 4, 200)
    out = kv_cache.copy_rows(target, jnp.array([2, 4, 0]), full, jnp.array([1, 2, 1]), 100)
    keys, values = (np.zeros_like(x) for x in whole(target))
    given_keys, given_values = whole(full)
    for into in (2, 0):  # row 4 is past the end
        keys[into, :, :, :100], values[into, :, :100] = given_keys[1, :, :, :100], given_values[1, :, :100]
    np.testing.assert_array_equal(whole(out)[0], keys)
    np.testing.assert_array_equal(whole(out)[1], values)


@pytest.mark.parametrize("last", [3, 63, 64, 129])
def test_attention_over_stretches_is_attention_over_all(full, last):
    queries, positions = normal(4, ROWS, 1, 4, 8), np.array([0, last // 2, last])
    visible = jnp.asarray(np.arange(LENGTH)[None, None] <= positions[:, None, None])
    expected = attend(queries, *plain(full), visible)
    np.testing.assert_allclose(attend_cached(queries, *layer(full), visible), expected, atol=1e-6)


def test_an_unseen_stretch_is_not_read(full):
    queries, visible = normal(4, ROWS, 1, 4, 8), jnp.broadcast_to(jnp.arange(LENGTH) < 64, (ROWS, 1, LENGTH))
    first = tuple(tuple(x if i == 0 else x * jnp.nan for i, x in enumerate(part)) for part in layer(full))
    expected = attend_cached(queries, *layer(full), visible)
    np.testing.assert_array_equal(attend_cached(queries, *first, visible), expected)


def plain(cache):
    keys, values = whole(cache)
    return jnp.asarray(keys.swapaxes(2, 3)), jnp.asarray(values)
