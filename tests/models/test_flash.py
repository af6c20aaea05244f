"""The splash kernel of TPUs, interpreted: it equals plain attention, alone and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import sharding
from jaxrl_llm.models import flash
from jaxrl_llm.models.attend import attend

ROWS, TIME, HEADS, KV, HEAD = 2, 130, 4, 2, 64  # 130: padded to two blocks of columns


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    shape = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)  # noqa: E731
    tensors = shape(ROWS, TIME, HEADS, HEAD), shape(ROWS, KV, TIME, HEAD), shape(ROWS, KV, TIME, HEAD)
    segment_ids = jnp.asarray([[1] * 70 + [2] * 50 + [0] * 10, [3] * TIME], jnp.int32)
    return *tensors, segment_ids, shape(ROWS, TIME, HEADS, HEAD) * (segment_ids != 0)[:, :, None, None]


def value_and_gradients(attention, problem):
    *tensors, segment_ids, weight = problem
    loss = lambda q, k, v: jnp.sum(attention(q, k, v, segment_ids) * weight)  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*tensors)


@pytest.fixture(scope="module")
def expected(problem):
    def plain(queries, keys, values, segment_ids):
        visible = jnp.tril(segment_ids[:, :, None] == segment_ids[:, None, :])
        return attend(queries, keys, values, visible)

    return value_and_gradients(plain, problem)


@pytest.mark.parametrize("shape", [None, (2, 1, 1, 2), (1, 1, 1, 4)], ids=["alone", "rows-heads", "beyond-heads"])
def test_splash_equals_plain_attention(problem, expected, shape):
    """Four devices do not divide two key heads: there every device has all of them."""
    mesh = None if shape is None else sharding.make_mesh(shape)
    found = value_and_gradients(lambda *x: flash.splash_attention(*x, mesh, interpret=True), problem)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), found, expected)


@pytest.mark.parametrize(
    ("platform", "dtype", "sizes"),
    [
        ("cpu", "bfloat16", ()),
        ("gpu", "bfloat16", (8, 64, 128)),
        ("gpu", "float32", ()),
        ("tpu", "bfloat16", (64, 128)),
        ("tpu", "float32", (64, 128)),
    ],
)
def test_where_there_is_a_library(monkeypatch, platform, dtype, sizes):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    for head_dim in (4, 8, 64, 128):
        assert flash.choose_attention("plain", head_dim, dtype) == "plain"
        by_itself = head_dim in sizes and dtype == "bfloat16"
        assert flash.choose_attention("auto", head_dim, dtype) == ("flash" if by_itself else "plain")
        if head_dim in sizes:
            assert flash.choose_attention("flash", head_dim, dtype) == "flash"
        else:
            with pytest.raises(ValueError, match=f"this is {platform} with {dtype} and head_dim={head_dim}; set it"):
                flash.choose_attention("flash", head_dim, dtype)
