"""Logical axes -> one mesh. The only file that spells a mesh axis.

Every parameter names its axes where it is declared (`models/`), and every batch array has rows; the table below maps
them to the mesh, which has five axes:

data     copies of the parameters, rows of the batch      tensor  heads, feed-forward width and vocabulary
fsdp     slices of the parameters, rows of the batch
expert   the experts of an MoE layer, slices of all other parameters, rows of the batch
context  the tokens of a row where it is scored or trained on, slices of the parameters, rows of a rollout

So a rollout has its rows on all axes but tensor, and a micro-batch has them on data, fsdp and expert, and its time on
context. Without that axis the two are the same.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import linear_call
from jax.experimental import mesh_utils
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "expert", "tensor", "context")

_RULES: dict[str | None, tuple[str, ...]] = {
    None: (),
    "rows": ("data", "fsdp", "expert", "context"),  # of a rollout, and the tokens of a micro-batch side by side
    "micro_rows": ("data", "fsdp", "expert"),
    "time": ("context",),
    "tokens": ("data", "fsdp", "expert", "context", "tensor"),
    **dict.fromkeys(("embed", "latent"), ("fsdp", "expert", "context")),
    "expert": ("expert",),
    **dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), ("tensor",)),
    **dict.fromkeys(("layers", "head_dim", "router", "norm", "rank"), ()),
}

MICRO_BATCH, ROLLOUT = ("micro_rows", "time"), ("rows", None)  # of arrays [b t ...] of one and of the other


def visible() -> list[Any]:
    """The devices of all processes; raises ValueError where JAX_PLATFORMS gives none."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        options: Any = jax.config
        asked = options.jax_platforms
        if not asked or isinstance(error, jax.errors.JaxRuntimeError):
            raise
        why = str(error).split(" (set")[0] or "it is not installed"
        raise ValueError(f"JAX_PLATFORMS={asked} gives no device ({why}); correct it, or unset it") from error


def make_mesh(
    shape: Sequence[int] = (-1, 1, 1, 1), devices: Sequence[Any] | None = None, dcn_shape: Sequence[int] = ()
) -> Mesh:
    """A mesh of `shape` = sizes of (data, fsdp, expert, tensor[, context]) over the first devices; one may be -1 (all
    remaining devices), and context is 1 where it is left out.

    Neighbours on an axis are neighbours on the wires of a TPU where all of its devices are taken. Slices of them that a
    slower network joins are cut along `dcn_shape`, sizes of the same axes; (): all along data. Of GPUs a host counts as
    a slice if `dcn_shape` is given; (): the devices in their order.

    Raises:
      ValueError: more devices are needed than are visible, -1 gives no whole number, with several processes the mesh
        would leave devices of some of them without work, or dcn_shape does not fit the slices or the shape.
    """
    devices = list(visible() if devices is None else devices)
    sizes = resolved(shape, len(devices))
    if math.prod(sizes) < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"mesh={tuple(shape)} over {AXES} takes {math.prod(sizes)} of {len(devices)} devices, and all "
            f"{jax.process_count()} processes must take part with all of theirs; set a size of mesh.shape to -1"
        )
    if math.prod(sizes) < len(devices):
        return _mesh(np.asarray(devices[: math.prod(sizes)]).reshape(sizes))
    return _mesh(_wired(devices, sizes, dcn_shape))


def _mesh(grid: np.ndarray) -> Mesh:
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _wired(devices: Sequence[Any], sizes: tuple[int, ...], dcn_shape: Sequence[int]) -> np.ndarray:
    # XLA numbers the hosts of GPUs and CPUs as slices too: jax.devices() has a host's side by side, so that the last
    # axes stay within one, and no axis need be cut.
    counted = devices[0].platform == "tpu" or dcn_shape
    slices = len({getattr(device, "slice_index", 0) for device in devices}) if counted else 1
    across = (*(dcn_shape or (slices, 1, 1, 1)), 1)[: len(AXES)]
    fits = len(across) == len(AXES) and math.prod(across) == slices and min(across) > 0
    if not fits or any(size % cut for size, cut in zip(sizes, across, strict=True)):
        raise ValueError(
            f"mesh.dcn_shape={across} must cut mesh.shape, {sizes} over {AXES}, into the {slices} "
            f"slice{'s' * (slices > 1)} of these devices; set it to sizes that divide those and have that product"
        )
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    within = [size // cut for size, cut in zip(sizes, across, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)


def resolved(shape: Sequence[int], visible: int, field: str = "mesh.shape") -> tuple[int, ...]:
    """The five sizes that `make_mesh` gives a mesh of this shape where so many devices are visible; raises as it."""
    sizes = [*shape, *[1] * (len(shape) == len(AXES) - 1)]
    if len(sizes) != len(AXES) or sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
        raise ValueError(
            f"{field}={tuple(shape)} must be four whole numbers, for {', '.join(AXES[:-1])}, or five with {AXES[-1]}, "
            f"at most one of them -1; set {field}"
        )
    given, needed = f"mesh={tuple(shape)} over {AXES}", math.prod(s for s in sizes if s != -1)
    if -1 in sizes:
        if visible % needed:
            raise ValueError(f"{given} does not divide the {visible} visible devices by {needed}; change {field}")
        sizes[sizes.index(-1)] = visible // needed
    elif needed > visible:
        raise ValueError(f"{given} needs {needed} devices, {visible} are visible; lower {field}, or set a size to -1")
    return tuple(sizes)


def mesh_of_same_devices(mesh: Mesh, shape: Sequence[int], field: str) -> Mesh:
    """The devices of `mesh` in the same order, in another shape: arrays of both meshes meet in one program.

    Raises:
      ValueError: as `make_mesh`, or the product of the sizes is not the number of devices.
    """
    sizes = resolved(shape, mesh.size, field)
    if math.prod(sizes) != mesh.size:
        raise ValueError(
            f"{field}={tuple(shape)} takes {math.prod(sizes)} of the {mesh.size} devices of mesh.shape; it must take "
            "all of them, so set one of its sizes to -1"
        )
    return _mesh(mesh.devices.reshape(sizes))


def platform(mesh: Mesh | None) -> str:
    """cpu, gpu or tpu: the mesh's, whose devices may be only compiled for; without a mesh this machine's."""
    name = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else name


def spec(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """The partition of an array with these logical axes.

    A mesh axis cuts the first dimension that names it. A dimension that its mesh axes do not divide is cut by the first
    of them that do, or stays whole.
    """
    return PartitionSpec(*_cuts(axes, shape, mesh)[0])


def _cuts(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """For each dimension the mesh axes that cut it, and those that would if they divided it."""
    cut: list[tuple[str, ...]] = []
    left: list[tuple[str, ...]] = []
    for axis, size in zip(axes, shape, strict=True):
        names = tuple(name for name in _RULES[axis] if not any(name in earlier for earlier in cut))
        count = len(names)
        while size % math.prod(mesh.shape[name] for name in names[:count]):
            count -= 1
        cut.append(names[:count])
        left.append(names[count:])
    return cut, left


def undivided(axes: Any, shapes: Any, mesh: Mesh) -> list[str]:
    """The dimensions of a tree's arrays that a mesh axis would cut if it divided them: "kv_heads 2 by tensor 4"."""
    named = jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, tuple))
    found = {
        f"{axis} {size} by {name} {mesh.shape[name]}": None
        for of, array in zip(named, jax.tree.leaves(shapes), strict=True)
        for axis, size, left in zip(of, array.shape, _cuts(of, array.shape, mesh)[1], strict=True)
        for name in left
        if mesh.shape[name] > 1
    }
    return list(found)


def shardings(axes: Any, shapes: Any, mesh: Mesh) -> Any:
    """NamedShardings for a tree of logical axes (tuples of names) and the tree of its abstract arrays."""
    return jax.tree.map(
        lambda a, s: NamedSharding(mesh, spec(a, s.shape, mesh)), axes, shapes, is_leaf=lambda a: isinstance(a, tuple)
    )


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over all axes but tensor."""
    return NamedSharding(mesh, PartitionSpec(_RULES["rows"]))


def micro_batch(mesh: Mesh) -> NamedSharding:
    """[b t] of a micro-batch: rows over data, fsdp and expert, time over context."""
    return NamedSharding(mesh, PartitionSpec(*(_RULES[axis] for axis in MICRO_BATCH)))


def shards(axis: str | None, mesh: Mesh | None) -> int:
    """Into how many parts the mesh splits a dimension with this logical axis, if they divide it."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in _RULES[axis])


def flat(x: jax.Array, axes: Sequence[str | None], mesh: Mesh | None) -> jax.Array:
    """[b t ...] as [n ...], n = b t, in an order in which the tokens of every device lie side by side, so that none
    moves; axes are those of b and t. `unflat` is the inverse."""
    (b, t), rest = x.shape[:2], x.shape[2:]
    r, c = _parts(axes, (b, t), mesh)
    if c == 1:
        return x.reshape(b * t, *rest)
    return _pinned(x.reshape(r, b // r, c, t // c, *rest).swapaxes(1, 2).reshape(b * t, *rest), ["rows"], mesh)


def unflat(x: jax.Array, shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh | None) -> jax.Array:
    """[n ...] of `flat` as [b t ...], shape = (b, t)."""
    (b, t), rest = shape, x.shape[1:]
    r, c = _parts(axes, (b, t), mesh)
    if c == 1:
        return x.reshape(b, t, *rest)
    return _pinned(x.reshape(r, c, b // r, t // c, *rest).swapaxes(1, 2).reshape(b, t, *rest), axes, mesh)


def _pinned(x: jax.Array, axes: Sequence[str | None], mesh: Mesh | None) -> jax.Array:
    """x with its first dimensions where these axes lie; the others stay where they are."""
    assert mesh is not None
    first, others = spec(axes, x.shape[: len(axes)], mesh), [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(axes))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*first, *others)))


def _parts(axes: Sequence[str | None], shape: tuple[int, int], mesh: Mesh | None) -> list[int]:
    """Into how many parts each dimension is cut."""
    if mesh is None:
        return [1, 1]
    local = NamedSharding(mesh, spec(axes, shape, mesh)).shard_shape(shape)
    return [whole // part for whole, part in zip(shape, local, strict=True)]


def gathered(part: jax.Array, cuts: Iterable[Any], mesh: Mesh) -> jax.Array:
    """Inside shard_map, the whole of an array of two or more dimensions, of which `part` is this device's slice.

    cuts: the entries of its spec; None for a dimension to leave cut. Each device gets its slice of the summed gradient.
    """
    for dimension, cut in enumerate(cuts):
        if axes := cutting(cut, mesh):
            if platform(mesh) == "tpu":
                part = _gathered(part, axes, dimension, _stages(axes, mesh))
            else:
                part = jax.lax.all_gather(part, axes, axis=dimension, tiled=True)
    return part


def _gathered(part: jax.Array, axes: tuple[str, ...], dimension: int, stages: Any) -> jax.Array:
    def gather(_: Any, part: jax.Array) -> jax.Array:
        return jax.lax.all_gather(part, axes, axis=dimension, tiled=True)

    def scatter(_: Any, whole: jax.Array) -> jax.Array:
        for names, groups in stages:
            whole = _scattered(whole, names, groups, dimension)
        return whole

    return linear_call(gather, scatter, (), part)


def _scattered(whole: jax.Array, names: tuple[str, ...], groups: Any, dimension: int) -> jax.Array:
    """This device's part, along a dimension, of the sum over its group. Elsewhere libtpu sums all on every device: it
    scatters along the first dimension, or the next to last where parts have whole tiles, but not where the last has a
    number of tiles without small parts, as 1187 x 128 = 151,936. That one is padded if this adds at most 2 %."""
    n = len(groups[0]) if groups else jax.lax.axis_size(names)
    at = 0 if whole.shape[dimension] % (16 * n) else min(dimension, whole.ndim - 2)
    there = whole.swapaxes(dimension, at)
    columns = there.shape[-1]
    if 50 * (spare := -columns % 2048) < columns:
        there = jnp.pad(there, [(0, 0)] * (there.ndim - 1) + [(0, spare)])
    there = with_layout_constraint(there, Layout(tuple(range(there.ndim))))
    part = jax.lax.psum_scatter(there, names, scatter_dimension=at, tiled=True, axis_index_groups=groups)
    return part[..., :columns].swapaxes(dimension, at)


def _stages(axes: tuple[str, ...], mesh: Mesh) -> Any:
    """The (axes, groups of places on them) over which a sum is scattered, one after the other; groups None: over all.

    On v5e, which have no SparseCores, libtpu scatters along a ring of devices, and over a whole slice of more than four
    sums everywhere: so several axes follow one another, and of one axis the lines of the torus come last.
    """
    order = [AXES.index(axis) for axis in axes]
    along = np.moveaxis(mesh.devices, order, range(len(axes))).reshape(math.prod(mesh.shape[a] for a in axes), -1)[:, 0]
    n, slices = len(along), {getattr(device, "slice_index", 0) for device in mesh.devices.flat}
    if along[0].device_kind != "TPU v5 lite" or n < mesh.size // len(slices) or n <= 4:
        return ((axes, None),)
    if len(axes) > 1:
        return tuple(stage for axis in axes for stage in _stages((axis,), mesh))
    at = np.array([getattr(device, "coords", ()) for device in along])
    line = max(k for k in range(1, n) if n % k == 0 and np.count_nonzero(np.ptp(at[:k], axis=0)) < 2)
    lines = np.arange(n).reshape(-1, line)
    return tuple((axes, tuple(map(tuple, groups.tolist()))) for groups in (lines.T, lines))


def but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """Policy of jax.checkpoint that keeps all but what `gathered` gives on TPUs, where otherwise the weights of all
    layers would be there at once."""
    return primitive.name != "linear_call"


def cutting(cut: str | Sequence[str] | None, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes of more than one device in a spec's entry."""
    return tuple(name for name in ([cut] if isinstance(cut, str) else cut or ()) if mesh.shape[name] > 1)


def put_rows(tree: Any, mesh: Mesh | None) -> Any:
    """Move host arrays [b ...], and records [l b t x], onto the mesh; replicated where the devices do not divide the
    rows."""
    if mesh is None:
        return jax.tree.map(jax.numpy.asarray, tree)

    def put(x: Any) -> jax.Array:
        where = rollout_sharding(x, mesh)
        return jax.make_array_from_callback(x.shape, where, lambda index: x[index])  # each process puts its own part

    return jax.tree.map(put, tree)


def local_bytes(tree: Any) -> int:
    """Bytes that one device holds of the arrays (or abstract shapes) of a tree."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def constrain(x: jax.Array, axes: Sequence[str | None], mesh: Mesh | None) -> jax.Array:
    """Pin x to its logical axes inside a jitted function; nothing to do on one device."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(axes, x.shape, mesh)))


def constrain_rows(tree: Any, mesh: Mesh | None, axis: int = 0) -> Any:
    """Pin the row dimension of every array of a tree."""
    return jax.tree.map(lambda x: constrain(x, [None] * axis + ["rows"] + [None] * (x.ndim - axis - 1), mesh), tree)


def constrain_rollout(tree: Any, mesh: Mesh | None) -> Any:
    """Pin the rows of arrays [b ...] and of records [l b t x]; on one device too, for equal shardings."""
    if mesh is None:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rollout_sharding(x, mesh)), tree)


def rollout_sharding(x: Any, mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array [b ...] or a record [l b t x] of a rollout."""
    axes = [None, "rows", None, None] if len(x.shape) == 4 else ["rows"] + [None] * (len(x.shape) - 1)
    return NamedSharding(mesh, spec(axes, x.shape, mesh))
