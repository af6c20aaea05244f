"""What is donated to a program lies in memory that it may overwrite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground import heap


def of_numpy(shape, seed=0):
    """An array on the device in the memory of numpy, as a reader of files leaves it, and that memory."""
    size = int(np.prod(shape))
    memory = np.empty(size + 16, np.float32)  # XLA takes memory as it is where it is aligned
    first = -memory.ctypes.data // 4 % 16
    host = memory[first : first + size].reshape(shape)
    host[...] = np.random.default_rng(seed).normal(size=shape)
    return jax.device_put(host, jax.devices()[0]), host


@functools.partial(jax.jit, donate_argnums=0)
def doubled(x):
    return 2 * x


def test_an_update_overwrites_what_was_read_from_a_file():
    read, host = of_numpy((64, 32))
    assert read.unsafe_buffer_pointer() == host.ctypes.data, "JAX copies what it is given: nothing is left to do"
    owned = heap.owned({"x": read})["x"]
    np.testing.assert_array_equal(owned, host)
    assert read.is_deleted()
    place = owned.unsafe_buffer_pointer()
    assert doubled(owned).unsafe_buffer_pointer() == place


def test_an_update_overwrites_what_a_writer_has_a_copy_of():
    """Where it lies, though the copies are held as numpy arrays; they keep their values, types and shardings."""
    for dtype in ("float32", "bfloat16", "int32"):
        x = jnp.arange(6).astype(dtype).reshape(2, 3)
        copy, place, expected = heap.copied({"x": x})["x"], x.unsafe_buffer_pointer(), np.asarray(x).copy()
        assert (copy.dtype, copy.sharding) == (x.dtype, x.sharding)
        held = np.asarray(copy)
        assert doubled(x).unsafe_buffer_pointer() == place
        np.testing.assert_array_equal(held, expected)


def test_the_room_is_made_again_only_where_memory_is_kept(monkeypatch):
    made = []
    monkeypatch.setattr(heap, "_make_room", made.append)
    monkeypatch.setattr(heap, "_keep", functools.cache(lambda: None))
    heap.settle()
    assert not made
    if heap._glibc() is not None:
        heap._keep()
        heap.settle()
        assert len(made) == 1
