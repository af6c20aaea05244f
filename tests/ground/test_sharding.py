"""The mesh: which devices a shape takes, and what is said when they do not fit."""

import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground import sharding
from tests.reference.slowly import first_quick


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


AT_ONCE = ((("fsdp",), None),)
STAGES = ((("fsdp",), ((0, 2), (1, 3))), (("fsdp",), ((0, 1), (2, 3))))
BY_AXIS = ((("fsdp",), None), (("expert",), None))


@pytest.mark.parametrize(
    ("stages", "shape"),
    [
        (None, (1, 2, 2, 1)),
        (AT_ONCE, (1, 4, 1, 1)),
        (AT_ONCE, (2, 2, 1, 1)),
        (STAGES, (1, 4, 1, 1)),
        (BY_AXIS, (1, 2, 2, 1)),
    ],
    ids=["cpu", "at once", "with copies", "in stages", "by axis"],
)
@pytest.mark.parametrize(
    ("axes", "size"),
    first_quick(
        2,
        [
            (("embed", "mlp"), (8, 3)),
            ((None, "embed", "mlp"), (3, 64, 5)),  # whole tiles in each part
            (("embed", "vocab"), (8, 2040)),
            ((None, "mlp", "embed"), (3, 5, 8)),
        ],
        several=True,
    ),
)
def test_a_gathered_array_and_its_gradient(stages, shape, axes, size, monkeypatch):
    """y_r = sum_i x_r w_i c_ri over rows r on four devices, w in slices of them: dw = sum_r x_r c_r. 2040 columns are
    padded on TPUs."""
    mesh = sharding.make_mesh(shape)
    if stages:  # as on TPUs
        monkeypatch.setattr(sharding, "platform", lambda mesh: "tpu")
        monkeypatch.setattr(sharding, "_stages", lambda *_: stages)
    x, c, w = (jax.random.normal(jax.random.key(i), n) for i, n in enumerate([(8,), (8, *size), size]))
    cuts = sharding.spec(axes, w.shape, mesh)

    def run(x, c, part):
        return x * jnp.tensordot(c, sharding.gathered(part, cuts, mesh), part.ndim)

    rows = sharding.rows(mesh).spec
    split = jax.shard_map(run, mesh=mesh, in_specs=(rows, rows, cuts), out_specs=rows, check_vma=False)
    y, pull = jax.vjp(lambda w: split(x, c, w), w)
    np.testing.assert_allclose(y, x * jnp.tensordot(c, w, w.ndim), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(pull(jnp.ones(8))[0], jnp.tensordot(x, c, 1), rtol=1e-4, atol=1e-5)


V5E = "TPU v5 lite"


def test_a_sum_over_a_whole_slice_of_v5e_is_scattered_in_two_stages():
    """The groups of both lie on lines of the torus; together they leave part i to device i."""
    mesh = sharding.make_mesh((1, 64, 1, 1), chips(V5E, (8, 8, 1), (2, 2, 1)))
    stages = [groups for _, groups in sharding._stages(("fsdp",), mesh)]
    assert [np.shape(groups) for groups in stages] == [(8, 8), (8, 8)]
    parts = {i: np.arange(mesh.size) for i in range(mesh.size)}
    for groups in stages:
        for group in groups:
            at = np.array([mesh.devices.flat[i].coords for i in group])
            assert np.count_nonzero(np.ptp(at, axis=0)) == 1
        parts = {i: np.split(parts[i], len(group))[place] for group in groups for place, i in enumerate(group)}
    assert all(part == [i] for i, part in parts.items())


@pytest.mark.parametrize(
    ("kind", "size", "shape", "stages"),
    [
        ("TPU v5", (4, 4, 4), (1, 4, 16, 1), [("fsdp", "expert")]),  # which has SparseCores
        (V5E, (8, 8, 1), (1, 8, 8, 1), [("fsdp",), ("expert",)]),
        (V5E, (8, 8, 1), (8, 4, 2, 1), [("fsdp", "expert")]),  # part of a slice
        (V5E, (2, 2, 1), (1, 2, 2, 1), [("fsdp", "expert")]),
    ],
)
def test_other_sums_are_scattered_at_once(kind, size, shape, stages):
    mesh = sharding.make_mesh(shape, chips(kind, size, (2, 2, 1)))
    assert sharding._stages(("fsdp", "expert"), mesh) == tuple((names, None) for names in stages)


class Chip(SimpleNamespace):
    """As jax lists a TPU's: by host, a rectangle of chips each, and within it by coordinates."""

    __hash__ = object.__hash__


def chips(kind, size, host, slices=1):
    """The devices of slices of this size, in the order of `jax.devices()`."""
    places = [(*range(n),) for n in (*size, 1)[:3]]
    coordinates = sorted(
        itertools.product(*places), key=lambda at: ([c // h for c, h in zip(at, host, strict=True)][::-1], at[::-1])
    )
    every = itertools.product(range(slices), enumerate(coordinates))
    per_host = math.prod(host)
    return [
        Chip(
            id=cut * len(coordinates) + i,
            coords=at,
            core_on_chip=0,
            platform="tpu",
            device_kind=kind,
            slice_index=cut,
            process_index=(cut * len(coordinates) + i) // per_host,
        )
        for cut, (i, at) in every
    ]


def hops(grid, axis, size):
    """Mean distance of neighbours on the ring of a mesh axis, on a torus of this size."""
    ring = zip(grid.flat, np.roll(grid, 1, axis).flat, strict=True)
    apart = [[abs(a - b) for a, b in zip(one.coords, other.coords, strict=True)] for one, other in ring]
    return float(np.mean([sum(min(d, n - d) for d, n in zip(steps, size, strict=True)) for steps in apart]))


@pytest.mark.parametrize(
    ("kind", "size", "host", "shape", "axis", "most"),
    [
        ("TPU v5 lite", (16, 16, 1), (2, 2, 1), (1, 256, 1, 1), 1, 1.1),
        ("TPU v5 lite", (16, 16, 1), (2, 2, 1), (1, 16, 1, 16), 3, 1.0),
        ("TPU v5", (4, 4, 4), (2, 2, 1), (1, 64, 1, 1), 1, 1.32),
        ("TPU v5", (4, 4, 4), (2, 2, 1), (1, 16, 4, 1), 2, 1.0),
    ],
)
def test_neighbours_on_an_axis_are_neighbours_on_the_wires(kind, size, host, shape, axis, most):
    devices = chips(kind, size, host)
    grid = sharding.make_mesh(shape, devices).devices
    assert sorted(device.id for device in grid.flat) == list(range(len(devices)))
    assert hops(grid, axis, size) <= most < hops(np.reshape(devices, grid.shape), axis, size)


def test_slices_are_cut_along_dcn_shape():
    """Two slices of 4 x 4: along data unless dcn_shape says fsdp; tensor and expert stay within a slice."""
    devices = chips("TPU v5 lite", (4, 4, 1), (2, 2, 1), slices=2)

    def crossed(shape, dcn_shape=()):
        grid = sharding.make_mesh(shape, devices, dcn_shape).devices
        cut = np.vectorize(lambda device: device.slice_index)(grid)
        return [i for i in range(grid.ndim) if (cut != np.roll(cut, 1, i)).any()]

    assert crossed((2, 16, 1, 1)) == [0]
    assert crossed((1, 32, 1, 1), (1, 2, 1, 1)) == [1]
    assert crossed((-1, 4, 1, 4)) == [0]
    with pytest.raises(ValueError, match=r"mesh.dcn_shape=\(2, 1, 1, 1, 1\) must cut mesh.shape, \(1, 32, 1, 1, 1\)"):
        sharding.make_mesh((1, 32, 1, 1), devices)
    with pytest.raises(ValueError, match="into the 1 slice of these devices"):
        sharding.make_mesh((2, 2, 1, 1), dcn_shape=(2, 1, 1, 1))


def test_hosts_of_gpus_are_no_slices_unless_dcn_shape_says_so():
    """XLA gives each host of GPUs a slice_index of its own. Two of 8: the last axes stay within one."""
    devices = [
        Chip(id=i, platform="gpu", device_kind="NVIDIA H100", slice_index=i // 8, process_index=i) for i in range(16)
    ]
    for shape in ((1, -1, 1, 1), (1, 2, 8, 1), (2, 8, 1, 1)):
        assert [device.id for device in sharding.make_mesh(shape, devices).devices.flat] == [*range(16)]
    grid = sharding.make_mesh((1, 16, 1, 1), devices, (1, 2, 1, 1)).devices
    assert [device.slice_index for device in grid.flat] == [0] * 8 + [1] * 8
    with pytest.raises(ValueError, match="into the 2 slices of these devices"):
        sharding.make_mesh((1, 16, 1, 1), devices, (1, 4, 1, 1))


@pytest.mark.parametrize("error", [RuntimeError("Unable to initialize backend 'x'"), AssertionError()])
def test_a_platform_that_is_not_there_is_named(monkeypatch, error):
    def devices():
        raise error

    monkeypatch.setattr(sharding.jax, "devices", devices)
    with pytest.raises(ValueError, match=r"JAX_PLATFORMS=cpu gives no device \(.+\); correct it, or unset it"):
        sharding.make_mesh((1, 1, 1, 1))
