"""A cache in stretches of columns is one cache: writing, copying rows and attending do not see the cuts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import ModelConfig
from jaxrl_llm.models.attention import attend as attention
from jaxrl_llm.models.attention import kv_cache
from tests.reference.slowly import first_quick

CONFIG = ModelConfig(vocab_size=4, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
ROWS, LENGTH = 3, 130
attend, attend_cached, write = (jax.jit(f) for f in (attention.attend, attention.attend_cached, kv_cache.write))


def whole(cache):
    return np.concatenate(cache.keys[0], axis=3), np.concatenate(cache.values[0], axis=2)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.fixture(scope="module")
def full():
    keys, values = normal(0, ROWS, LENGTH, 2, 8), normal(1, ROWS, LENGTH, 2, 8)
    cache = kv_cache.empty(CONFIG, ROWS, LENGTH)
    return kv_cache.KVCache(*((x,) for x in write(*layer(cache), keys, values, jnp.zeros(ROWS, jnp.int32))))


def layer(cache):
    return cache.keys[0], cache.values[0]


def test_stretches_cover_the_length_and_are_few():
    for length, sizes in ((1, [1]), (64, [64]), (130, [64, 64, 2]), (1000, [125] * 8)):
        cache = kv_cache.empty(CONFIG, ROWS, length)
        assert [x.shape[2] for x in cache.values[0]] == sizes
        assert [x.shape[3] for x in cache.keys[0]] == sizes
        assert kv_cache.starts(cache.values[0])[-1] == length


@pytest.mark.parametrize("t", [1, 5])
def test_each_row_is_written_from_its_own_column(full, t):
    column = np.array([0, 62, LENGTH - t], np.int32)
    new_keys, new_values = normal(2, ROWS, t, 2, 8), normal(3, ROWS, t, 2, 8)
    written = write(*layer(full), new_keys, new_values, jnp.asarray(column))
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


def test_a_stretch_of_fewer_rows_is_that_of_consecutive_rows(full):
    """Two prompts of three answers each: the shared columns once a prompt, or copied to every answer."""
    keys, values = normal(5, 2, 2, 8, 7), normal(6, 2, 2, 7, 8)
    own = tuple(tuple(jnp.concatenate([x, x + 1]) for x in part) for part in layer(full))
    queries = normal(4, 2 * ROWS, 1, 4, 8)
    visible = jnp.asarray(np.random.default_rng(0).random((2 * ROWS, 1, 7 + LENGTH)) < 0.5)
    copied = [jnp.repeat(x, ROWS, axis=0) for x in (keys, values)]
    expected = attend_cached(queries, (copied[0], *own[0]), (copied[1], *own[1]), visible)
    found = attend_cached(queries, (keys, *own[0]), (values, *own[1]), visible)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert (
        np.abs(found - attend_cached(queries, (copied[0][::-1], *own[0]), (copied[1], *own[1]), visible)).max() > 0.01
    )


def test_tokens_behind_a_prefix_have_columns_of_their_own():
    """Prompts of 2 and 3 tokens in 3 columns, two answers each, at positions 2, 4 and 3, 6: columns 0, 2 and 0, 3."""
    shared = kv_cache.empty(CONFIG, 2, 3)
    prefix = kv_cache.Prefix(shared.keys, shared.values, jnp.array([2, 3]))
    cache = kv_cache.empty(CONFIG, 4, 5).replace(prefix=prefix)
    (only,), visible = kv_cache.by_group(cache, jnp.array([[2], [4], [3], [6]]))
    np.testing.assert_array_equal(only.column, [0, 2, 0, 3])
    assert only.prefix == (prefix.keys[0], prefix.values[0])
    expected = ["110 10000", "110 11100", "111 10000", "111 11110"]
    assert ["".join("01"[int(v)] for v in row[0]) for row in visible] == [e.replace(" ", "") for e in expected]


@pytest.mark.parametrize("t", first_quick(1, [1, 3]))
def test_a_stack_is_written_and_read_as_its_layers_are(t):
    """Two layers: columns written behind what is there, and attention over both, as of each layer alone."""
    cache = kv_cache.empty(dataclasses.replace(CONFIG, num_hidden_layers=2), ROWS, LENGTH, kv_cache.STACKED)
    assert [x.shape for x in cache.keys[0]] == [x.shape for x in cache.values[0]] == [(2, ROWS, 2, 64, 8)] * 4
    first, new = ([normal(seed + i, 2, ROWS, n, 2, 8) for i in (0, 1)] for seed, n in ((10, LENGTH), (20, t)))
    column = jnp.array([0, 62, LENGTH - t])
    (of,), _ = kv_cache.by_group(cache, jnp.zeros((ROWS, LENGTH), jnp.int32), kv_cache.STACKED)
    cache = kv_cache.KVCache(*((x,) for x in kv_cache.write_stack(of, *first, None)))
    positions = column[:, None] + jnp.arange(t)[None]
    (before,), visible = kv_cache.by_group(cache, positions, kv_cache.STACKED)
    after = kv_cache.write_stack(before, *new, None)
    queries = normal(4, ROWS, t, 4, 8)
    for number in range(2):
        alone = write(*layer(kv_cache.empty(CONFIG, ROWS, LENGTH)), *(x[number] for x in first), jnp.zeros_like(column))
        alone = write(*alone, *(x[number] for x in new), column)
        for found, wanted, turned in ((after[0], alone[0], True), (after[1], alone[1], False)):
            found = np.concatenate([x[number] for x in found], axis=2)[:, :, :LENGTH]
            wanted = np.concatenate(wanted, axis=3 if turned else 2)
            np.testing.assert_array_equal(found, wanted.swapaxes(2, 3) if turned else wanted)
        mine = before.of_layer(jnp.asarray(number))
        read = [(*old, x[number].swapaxes(1, 2)) for old, x in zip((mine.keys, mine.values), new, strict=True)]
        found = attention.attend_cached(queries, *read, visible, "tpu", kv_cache.STACKED)
        seen = jnp.arange(LENGTH)[None, None] <= positions[:, :, None]
        np.testing.assert_allclose(found, attend_cached(queries, *alone, seen), atol=1e-6)
