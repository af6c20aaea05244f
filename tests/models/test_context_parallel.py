"""Rows whose tokens are spread over devices: equal attention, equal work for every device, and what is computed."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.scale.hlo import parse
from experiments.scale.hlo_cost import measure
from jaxrl_llm.ground import sharding
from jaxrl_llm.models.attention import flash
from jaxrl_llm.models.attention.attend import attend
from jaxrl_llm.models.attention.context_parallel import Place, attend_halves, attend_spread
from tests.reference.plain_attention import assert_close, plain, value_and_gradients
from tests.reference.slowly import first_quick

ROWS, TIME, HEADS, KV, HEAD = 2, 22, 4, 2, 8  # 22: padded to 24 where four devices share a row
MESHES = [(1, 1, 1, 1, 2), (1, 1, 1, 1, 4), (2, 1, 1, 1, 2), (1, 1, 1, 2, 2)]


def draw(time, head):
    rng = np.random.default_rng(0)
    shapes = (ROWS, time, HEADS, head), (ROWS, KV, time, head), (ROWS, KV, time, head), (ROWS, time, HEADS, head)
    *tensors, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    ends = [round(time * share) for share in (0.55, 0.9)]  # two segments and padding; the other row is one segment
    segment_ids = np.full((ROWS, time), 3, np.int32)
    segment_ids[0] = np.searchsorted(ends, np.arange(time), side="right") + 1
    segment_ids[0, ends[1] :] = 0
    return *tensors, jnp.asarray(segment_ids), weight * (segment_ids != 0)[:, :, None, None]


def spread(queries, keys, values, segment_ids, mesh):
    return attend_spread(attend_halves(attend), queries, keys, values, segment_ids, sharding.MICRO_BATCH, mesh)


@pytest.mark.parametrize("shape", first_quick(2, MESHES), ids=str)
def test_spread_attention_is_attention(shape):
    problem = draw(TIME, HEAD)
    attention = functools.partial(spread, mesh=sharding.make_mesh(shape))
    assert_close(value_and_gradients(attention, problem), value_and_gradients(plain, problem))


@pytest.mark.parametrize("shape", first_quick(1, [(1, 1, 1, 2, 2), (1, 1, 1, 1, 2)]), ids=str)
def test_splash_over_devices_is_attention(monkeypatch, shape):
    """Chunks of 128 queries, the least that the kernel takes."""
    monkeypatch.setattr(flash, "_splash", functools.partial(flash._splash, interpret=True))
    problem, mesh = draw(4 * 128 - 7, 64), sharding.make_mesh(shape)
    attention = functools.partial(flash.flash_attention, axes=sharding.MICRO_BATCH, mesh=mesh)
    assert_close(value_and_gradients(attention, problem), value_and_gradients(plain, problem))


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_every_device_sees_as_many_pairs(shards):
    """Of a causal row: a chunk and the one that mirrors it."""
    time = 2 * shards * 5
    order = Place("context", shards).order(time).reshape(shards, -1)
    np.testing.assert_array_equal(np.sort(order.ravel()), np.arange(time))
    assert len({int(np.sum(queries + 1)) for queries in order}) == 1


def test_no_device_scores_all_pairs():
    """Matrix products fall with the devices that share a row: 3/4 of all pairs are computed, in equal parts; only keys,
    values and segment ids are gathered."""
    mesh = sharding.make_mesh((1, 1, 1, 1, 4))
    problem = draw(64, HEAD)
    where = [sharding.micro_batch(mesh)] * 5
    where[1] = where[2] = sharding.shardings(("micro_rows", None, "time", None), problem[1], mesh)

    def gradients(q, k, v, segment_ids, weight):
        return jax.grad(lambda q, k, v: jnp.sum(spread(q, k, v, segment_ids, mesh) * weight), (0, 1, 2))(q, k, v)

    compiled = jax.jit(gradients, in_shardings=where, out_shardings=tuple(where[:3])).lower(*problem).compile()
    text = compiled.as_text()
    cost, _ = measure(parse(text), mesh.size)
    products = 2 + 4  # forward and backward, which in one program take the scores q k^T from the same product
    assert cost.flops == pytest.approx(2 * products * 0.75 * ROWS * HEADS * 64**2 * HEAD / 4)
    sizes = [np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"f32\[([\d,]+)\]", text)]
    assert max(sizes) <= ROWS * HEADS * 64 * 64 / 8  # scores of one chunk
    gathered = 4 * (2 * problem[1].size + problem[3].size)  # the gradients of keys and values go the other way
    assert cost.collectives["all-gather"][1] == pytest.approx(gathered * 3 / 4)
