"""Several processes that train one run: what they tell one another through the host.

All run the same program on the same prompts. The devices of each hold a part of every array; what the host computes
itself, the verifier above all, is shared out by `share` and comes together again by `gather`. Every function here but
`share` is a collective: all processes call it, in the same order. With one process they return what they were given.
"""

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def share(count: int) -> range:
    """The places among `count` items that this process takes: contiguous, and in the order of the processes."""
    index, processes = jax.process_index(), jax.process_count()
    return range(count * index // processes, count * (index + 1) // processes)


def gather(own: Sequence[Any]) -> list[Any]:
    """The items of all processes in their order, as plain JSON values; `own` are those of this process."""
    if jax.process_count() == 1:
        return list(own)
    content = np.frombuffer(json.dumps(list(own)).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(content.size))
    width = 1 << int(max(sizes) - 1).bit_length()  # powers of two: few sizes, each of which compiles once
    rows = multihost_utils.process_allgather(np.pad(content, (0, width - content.size)))
    return [item for row, size in zip(rows, sizes, strict=True) for item in json.loads(row[:size].tobytes())]


def fetch(tree: Any) -> Any:
    """The arrays of a tree on the host, each whole, also where they span processes."""
    if jax.process_count() == 1:
        return jax.device_get(tree)

    def whole(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return jax.device_get(x)
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(whole, tree)


def largest(value: int) -> int:
    """The largest of the values that the processes give."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.process_allgather(np.asarray(value)).max())


def everywhere(true: bool) -> bool:
    """Whether it is true in every process."""
    return not largest(not true)


def wait_for_all(place: str) -> None:
    """Until every process has come to this place, which has a name of its own."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(place)
