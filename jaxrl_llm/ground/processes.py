"""Several processes that train one run: what they tell one another through the host.

All run the same program on the same prompts. The devices of each hold a part of every array; what the host computes
itself, the verifier above all, is shared out by `share` and comes together again by `gather`. Every function here but
`share` and `leave` is a collective: all processes call it, in the same order. With one process they return what they
were given.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils


def require_same(own: Mapping[str, str], limit_s: int) -> None:
    """Raise in every process if what they give is not the same. They may be of several versions, so that nothing is
    computed: they exchange texts through the store of JAX's coordinator.

    Args:
      own: {what: a short text}; what is compared first stands first. limit_s: the longest wait for another process.

    Raises:
      ValueError: the first difference, its values and the processes that have each of them.
    """
    store: Any = distributed.global_state.client
    place, count = distributed.global_state.process_id, distributed.global_state.num_processes
    store.key_value_set(f"jaxrl_llm/same/{place}", json.dumps(dict(own)))
    given = [json.loads(store.blocking_key_value_get(f"jaxrl_llm/same/{i}", limit_s * 1000)) for i in range(count)]
    if found := first_difference(given):
        refuse(found)


def refuse(message: str) -> NoReturn:
    """A ValueError that every process raises; none ends, and breaks another's connection, before all are here."""
    jax.distributed.shutdown()
    raise ValueError(message)


def first_difference(given: Sequence[Mapping[str, str]]) -> str:
    """The first name whose texts differ between the processes, in a line; "" if there is none."""
    for name in dict.fromkeys(name for one in given for name in one):
        values: dict[str, list[int]] = {}
        for place, one in enumerate(given):
            values.setdefault(one.get(name, "absent"), []).append(place)
        if len(values) > 1:
            shown = [f"{value[:100]} in {_places(places)}" for value, places in values.items()]
            return f"the processes do not run the same: {name} is {', '.join(shown)}; start all of them alike"
    return ""


def _places(places: Sequence[int]) -> str:
    shown = ", ".join(map(str, places[:8])) + (", ..." if len(places) > 8 else "")
    return f"process{'es' * (len(places) > 1)} {shown}"


def share(count: int) -> range:
    """The places among `count` items that this process takes: contiguous, and in the order of the processes."""
    return _share(count, jax.process_index())


def _share(count: int, index: int) -> range:
    processes = jax.process_count()
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


def gather_rows(own: Any, count: int) -> Any:
    """The host arrays of all `count` rows, in a tree of arrays whose rows are those that `share(count)` gives here."""
    if jax.process_count() == 1:
        return own
    sizes = [len(_share(count, index)) for index in range(jax.process_count())]

    def whole(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, [(0, max(sizes) - len(x))] + [(0, 0)] * (x.ndim - 1))  # of one shape in every process
        each = multihost_utils.process_allgather(padded)
        return np.concatenate([rows[:size] for rows, size in zip(each, sizes, strict=True)])

    return jax.tree.map(whole, own)


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


def agreed_stop(heard: int, step: int) -> int:
    """The signal on which all processes stop after this step, 0 for none: the largest that any of them has heard, where
    notice that JAX's preemption service was given counts as SIGTERM.

    Args:
      step: 1, 2, ... of this start, every one of them: the service stops at the one after the last that it was asked
        about, which is 0 at first.
    """
    noticed = multihost_utils.reached_preemption_sync_point(step)
    return largest(heard or (signal.SIGTERM if noticed else 0))


def everywhere(true: bool) -> bool:
    """Return whether it is true in every process."""
    return not largest(not true)


def share_folder(folder: Path) -> bool:
    """Return whether all processes see what the first one writes into a folder."""
    if jax.process_count() == 1:
        return True
    token = folder / f".seen-{gather([time.time_ns()])[0]}"
    if jax.process_index() == 0:
        token.touch()
    wait_for_all("processes.share_folder")
    seen = everywhere(token.exists())
    if jax.process_index() == 0:
        token.unlink()
    return seen


def wait_for_all(place: str) -> None:
    """Until every process has come to this place, which has a name of its own."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(place)


def leave(code: int, *, alone: bool = True) -> int:
    """The exit code; of several processes, one that ends `alone` does so here if it failed.

    At exit it would wait for the others, which wait for it: they are to see a broken connection, or miss heartbeats.
    """
    if jax.distributed.is_initialized() and code and alone:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
