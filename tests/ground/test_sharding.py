"""The mesh: which devices a shape takes, and what is said when they do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground import sharding


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((1, 1, 1, 1), (1, 1, 1, 1)),
        ((1, 2, 1, 1), (1, 2, 1, 1)),
        ((1, 1, 1, 3), (1, 1, 1, 3)),
        ((-1, 1, 1, 1), (4, 1, 1, 1)),
        ((1, 2, -1, 1), (1, 2, 2, 1)),
        ((1, 1, 1, 1, 2), (1, 1, 1, 1, 2)),
        ((1, -1, 1, 1, 2), (1, 2, 1, 1, 2)),
    ],
)
def test_a_mesh_takes_the_first_devices(shape, sizes):
    """Of four: a shape of one device runs on a machine with more, and -1 takes them all. A fifth size is 1 if it is
    left out."""
    mesh = sharding.make_mesh(shape)
    assert mesh.devices.shape == (*sizes, 1)[:5]
    assert list(mesh.devices.flat) == jax.devices()[: mesh.size]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 4, 1, 1), r"needs 8 devices, 4 are visible; lower mesh.shape, or set a size to -1"),
        ((-1, 3, 1, 1), r"does not divide the 4 visible devices by 3; change mesh.shape"),
        ((-1, 8, 1, 1), r"does not divide the 4 visible devices by 8"),
        ((-1, -1, 1, 1), r"at most one of them -1; set mesh.shape"),
        ((1, 1, 1), r"mesh.shape=\(1, 1, 1\) must be four whole numbers"),
        ((0, 1, 1, 1), r"must be four whole numbers"),
        ((1, 1, 1, 1, 1, 1), r"must be four whole numbers, .* or five with context"),
    ],
)
def test_shapes_that_do_not_fit_name_the_remedy(shape, message):
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(shape)


def test_several_processes_take_every_device(monkeypatch):
    """A part of them would leave a process without work, or with a part of its own devices."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ValueError, match=r"takes 1 of 4 devices, and all 2 processes .* set a size of mesh.shape to -1"
    ):
        sharding.make_mesh((1, 1, 1, 1))
    assert sharding.make_mesh((1, -1, 1, 1)).size == sharding.make_mesh((2, 2, 1, 1)).size == 4


def test_what_a_mesh_does_not_divide_is_named():
    """Two heads over four devices are whole on each; an axis that cuts an earlier dimension is not missed later."""
    mesh = sharding.make_mesh((1, 1, 1, 4))
    axes = {"k": ("layers", "embed", "kv_heads", "head_dim"), "o": ("heads", "embed"), "again": (None, "kv_heads")}
    sizes = {"k": (3, 6, 2, 5), "o": (8, 6), "again": (7, 2)}
    shapes = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    assert sharding.undivided(axes, shapes, mesh) == ["kv_heads 2 by tensor 4"]
    twice = sharding.make_mesh((1, 2, 2, 1))
    assert sharding.undivided(axes, shapes, twice) == ["embed 6 by expert 2"]
    assert sharding.undivided(axes, shapes, sharding.make_mesh((2, 1, 1, 2))) == []
    experts = {"w": ("expert", "embed")}
    assert sharding.undivided(experts, {"w": jax.ShapeDtypeStruct((4, 6), jnp.float32)}, twice) == []


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 1, 1, 2), (2, 1, 1, 2), (1, 1, 1, 2, 2)], ids=str)
def test_tokens_side_by_side_stay_on_their_devices(shape):
    """Each device has the same tokens before and after; the way back gives the array."""
    mesh, axes = sharding.make_mesh(shape), sharding.MICRO_BATCH
    x = jax.device_put(jnp.arange(4 * 6 * 3).reshape(4, 6, 3), sharding.micro_batch(mesh))
    flat = jax.jit(lambda x: sharding.flat(x, axes, mesh), out_shardings=sharding.rows(mesh))(x)
    assert flat.shape == (24, 3)
    for before, after in zip(x.addressable_shards, flat.addressable_shards, strict=True):
        np.testing.assert_array_equal(before.data.reshape(-1, 3), after.data)
    np.testing.assert_array_equal(jax.jit(lambda x: sharding.unflat(x, (4, 6), axes, mesh))(flat), x)
