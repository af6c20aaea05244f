"""Digests of trees of arrays, by which a checkpoint knows flipped bits and other dtypes."""

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def digests(tree: Any) -> dict[str, str]:
    """A digest of every leaf, the same on every mesh and for every number of processes.

    It is the sum over elements of h(bits, flat index) mod 2^32, for two functions h. The order of summation is free, so
    every shard is digested on its device. h is a bijection of the bits: one changed element is always seen, several are
    seen with probability 1 - 2^-64.
    """
    return digests_begun(tree)()


def digests_begun(tree: Any) -> Callable[[], dict[str, str]]:
    """Return a function that gives the digests of the tree as it is now, also once its arrays have been donated.

    Accelerators compute them before whatever is dispatched next; a CPU's buffers are held, as Orbax holds them.
    """
    named = {jax.tree_util.keystr(path): jnp.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    leaves = list(named.values())
    kinds = [(leaf.dtype, tuple(leaf.shape)) for leaf in leaves]
    if all(x.is_fully_addressable and all(device.platform == "cpu" for device in x.devices()) for x in leaves):
        held = [np.asarray(leaf) for leaf in leaves]
        summed = lambda: [_sums(np, leaf) for leaf in held]  # noqa: E731  nothing to compile
    else:
        sums = _sums_of_all(leaves)
        summed = lambda: jax.device_get(sums)  # noqa: E731

    def finished() -> dict[str, str]:
        return {
            name: f"{dtype}{shape} {a:08x}{b:08x}"
            for name, (dtype, shape), (a, b) in zip(named, kinds, summed(), strict=True)
        }

    return finished


def digest(tree: Any) -> str:
    return digest_of_json(digests(tree))


def digest_of_json(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


@jax.jit
def _sums_of_all(leaves: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    return [_sums(jnp, leaf) for leaf in leaves]


def _sums(xp: Any, x: Any) -> tuple[Any, Any]:
    """The two sums of one array; xp is numpy or jax.numpy."""
    shape = x.shape or (1,)
    unsigned = {1: xp.uint8, 2: xp.uint16, 4: xp.uint32}[x.dtype.itemsize]
    bits = x.reshape(shape).view(unsigned).astype(xp.uint32)
    index = xp.zeros(shape, xp.uint32)
    for axis, size in enumerate(shape):
        along = xp.arange(size, dtype=xp.uint32) * xp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        index = index + along.reshape([-1 if n == axis else 1 for n in range(len(shape))])

    def mixed_sum(first: int, second: int) -> Any:
        """Odd multiplications and shifted xors, each a bijection of 32 bits (as MurmurHash3 ends)."""
        mixed = (bits ^ (index * xp.uint32(first))) * xp.uint32(second)
        mixed = (mixed ^ (mixed >> 15)) * xp.uint32(first)
        mixed = (mixed ^ (mixed >> 13)) * xp.uint32(second)
        return xp.sum(mixed ^ (mixed >> 16), dtype=xp.uint32)

    return mixed_sum(0x9E3779B1, 0x85EBCA77), mixed_sum(0xC2B2AE3D, 0x27D4EB2F)
