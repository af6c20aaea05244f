"""Reads a checkpoint, in whole or in part, and verifies what it read; nothing is written.

Orbax notices missing, extra and misshapen leaves but neither flipped bits nor a cast dtype, hence the digests.
"""

import os
import re
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl_llm.ground import processes
from jaxrl_llm.ground.terminal import said_in_one_line
from jaxrl_llm.records import places
from jaxrl_llm.records.digests import digest_of_json, digests
from jaxrl_llm.records.saved_trees import shapes


def saved_files(workdir: str | os.PathLike[str], step: int) -> dict[str, str]:
    """Return the DIR's files in a checkpoint of a PLACE, for `places.unpack_files`. Raises as `saved_payload`."""
    return _read_json(workdir, step, "files", dict)


def saved_payload(workdir: str | os.PathLike[str], step: int) -> dict[str, Any]:
    """{"digests", "extra", "digest"} of a checkpoint as it was saved, without its state.

    Raises:
      ValueError: it cannot be read, or is not what was saved.
    """
    return _read_json(workdir, step, "payload", _checked)


def _read_json(
    workdir: str | os.PathLike[str], step: int, item: str, checked: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    place = _place(workdir, step)
    try:
        with _reader() as reader:
            return checked(reader.restore(place, args=_items({item: ocp.args.JsonRestore()}))[item])  # pyright: ignore
    except Exception as error:  # Orbax raises exceptions of any type
        raise ValueError(f"checkpoint {place} cannot be read ({said_in_one_line(error)})") from error


def read_state(
    place: Any, like: Any, in_flight: Callable[[Any], jax.sharding.Sharding] | None = None
) -> tuple[Any, dict[str, Any]]:
    """(state, extra) of the checkpoint in a folder; all processes read it together. See `Checkpoints.restore`.

    Raises:
      Exception: Orbax's, of any type, where it cannot be read.
      ValueError: a leaf is not what was saved, or another process could not read its part.
    """
    args: dict[str, Any] = {"state": ocp.args.StandardRestore(shapes(like)), "payload": ocp.args.JsonRestore()}  # pyright: ignore
    restored, error = None, None
    try:
        with _reader() as reader:
            if in_flight is not None and (beside := reader.metadata(place).item_metadata.get("in_flight")):
                args["in_flight"] = ocp.args.StandardRestore(shapes(beside.tree, in_flight))  # pyright: ignore
            restored = reader.restore(place, args=_items(args))
        _checked(restored["payload"])
    except Exception as own:  # Orbax raises exceptions of any type
        error = own
    if not processes.everywhere(error is None) or restored is None:
        raise error or ValueError("another process could not read it")
    state, payload, beside = restored["state"], restored["payload"], restored.get("in_flight") or []
    own, saved = digests(state) | digests(beside), payload["digests"]
    names = own if in_flight is None else saved | own  # an item that is not there at all is damage too
    different = [name for name in names if own.get(name) != saved.get(name)]
    if not processes.everywhere(not different):
        raise ValueError(f"{', '.join(different[:3]) or 'leaves of another process'} differ from their digests")
    return state, payload["extra"] | ({} if in_flight is None else {"in_flight": beside})


def read_part(workdir: str | os.PathLike[str], step: int, like: Any) -> Any:
    """Some leaves of the state of a checkpoint: those of `like`, nested dicts by the fields and keys of the state.

    Raises:
      ValueError: a leaf is missing, of another shape or dtype, or not what was saved.
    """
    place, target = _place(workdir, step), shapes(like)
    into = ocp.checkpoint_utils.construct_restore_args(target)
    part = ocp.args.PyTreeRestore(target, restore_args=into, partial_restore=True)  # pyright: ignore
    try:
        with _reader(state=ocp.PyTreeCheckpointHandler) as reader:
            restored = reader.restore(place, args=_items({"state": part, "payload": ocp.args.JsonRestore()}))  # pyright: ignore
        saved = {_plain_path(name): digest for name, digest in restored["payload"]["digests"].items()}
    except Exception as error:  # Orbax raises exceptions of any type
        raise ValueError(f"checkpoint {place} cannot be read ({said_in_one_line(error)})") from error
    own = {_plain_path(name): digest for name, digest in digests(restored["state"]).items()}
    if different := [name for name, digest in own.items() if saved.get(name) != digest]:
        raise ValueError(
            f"checkpoint {place} is damaged or of another model: {', '.join(different[:3])} differ from their digests"
        )
    return restored["state"]


def _place(workdir: str | os.PathLike[str], step: int) -> Any:
    return places.absolute(places.root_of(workdir) / "checkpoints" / str(step))


def _items(args: dict[str, Any]) -> Any:
    return ocp.args.Composite(**args)


def _checked(payload: dict[str, Any]) -> dict[str, Any]:
    if payload["digest"] != digest_of_json([payload["digests"], payload["extra"]]):
        raise ValueError("its payload differs from its digest")
    return payload


def _reader(state: Any = ocp.StandardCheckpointHandler) -> ocp.Checkpointer:
    """Reads this process's shards and waits for no other process: one that meets a damaged file never arrives."""
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
    handler = ocp.CompositeCheckpointHandler(
        state=state(multiprocessing_options=alone),
        in_flight=ocp.StandardCheckpointHandler(multiprocessing_options=alone),
        payload=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
        files=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _plain_path(path: str) -> str:
    """params/moe/norm for ".params['moe']['norm']" and for "['params']['moe']['norm']"."""
    return "/".join(re.findall(r"\w+", path))
