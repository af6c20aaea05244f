"""Checkpoints with Orbax: bounded in number, written whole or not at all, and verified when they are read.

A checkpoint holds the state (any pytree of arrays), what is in flight beside it (of a run with a lag), a digest of
every leaf, and JSON of the caller (iterator state, config hash). `checkpoint_reader.py` reads one.
"""

import copy
import dataclasses
import functools
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxrl_llm.ground import heap, processes
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.terminal import said_in_one_line
from jaxrl_llm.records import places
from jaxrl_llm.records.digests import digest_of_json, digests_begun

_READING = ByName({"read_state": "jaxrl_llm.records.checkpoint_reader"})


def steps_of(workdir: str | os.PathLike[str]) -> list[int]:
    """The steps of the complete checkpoints of a DIR or a PLACE (see places.py), ascending; reads names only.

    Raises:
      OSError: a PLACE that is no folder cannot be read.
    """
    folder = places.root_of(workdir) / "checkpoints"
    if isinstance(folder, Path):
        return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal() and path.is_dir())
    try:  # an object store renames nothing: what is complete says so inside
        if folder.exists():
            return sorted(ocp.utils.checkpoint_steps(folder))
        if not folder.parents[-3].exists():
            raise FileNotFoundError("there is no such bucket")
        return []
    except Exception as error:  # its client raises exceptions of any type
        raise OSError(
            f"{folder} cannot be read ({said_in_one_line(error)}); give the name of a bucket that this machine may "
            "read and write"
        ) from error


class Checkpoints:
    """The checkpoints of a DIR, in its folder `checkpoints` or that of its PLACE, which keeps the newest ones.

    One in a PLACE brings the files of the DIR too (places.py). `near` are others of the same run, saved more often: a
    restore takes the newest of both. `of_process`: the folder is this process's alone, which writes there all that its
    devices hold; a checkpoint is there where all processes have it. The one that `save` calls the best stays too.

    Raises:
      OSError: the folder is not there and cannot be made.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        keep: int = 1,
        near: "Checkpoints | None" = None,
        *,
        of_process: bool = False,
    ):
        self.near, self._of_process = near, of_process
        self._workdir, root = Path(workdir), places.root_of(workdir)
        self._carries_files = places.is_elsewhere(workdir, root)
        self.folder = places.absolute(root) / "checkpoints"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"{self.folder} cannot be written ({error}); give another --workdir") from error
        _quiet()
        primary = ocp.options.MultiprocessingOptions()
        if of_process:  # all are primary; the others may be written meanwhile, so these barriers have their own names
            primary = dataclasses.replace(primary, primary_host=None, barrier_sync_key_prefix="near")
        self._best, newest = _Best(), ocp.checkpoint_managers.LatestN(keep)
        kept = ocp.checkpoint_managers.AnyPreservationPolicy([newest, self._best])
        options = ocp.CheckpointManagerOptions(preservation_policy=kept, create=True, multiprocessing_options=primary)
        handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
        for arguments in (ocp.args.JsonSave, ocp.args.JsonRestore):
            for item in ("payload", "files"):
                handlers.add(item, arguments, _Later(multiprocessing_options=primary))
        if of_process:
            for item in ("state", "in_flight"):
                handlers.add(item, ocp.args.PyTreeSave, _of_process(primary))
        self._manager = _Manager(self.folder, options=options, handler_registry=handlers)

    @property
    def latest(self) -> int | None:
        return max((step for step, _ in self._found()), default=None)

    def _found(self) -> list[tuple[int, "Checkpoints"]]:
        """(step, whose) of every checkpoint, oldest first; of two of a step the nearer one is last."""
        whose = [self] if self.near is None else [self, self.near]
        return sorted(((step, one) for one in whose for step in one._steps()), key=lambda pair: pair[0])

    def _steps(self) -> Sequence[int]:
        """Return the steps whose checkpoints every process sees."""
        steps = self._manager.all_steps()
        return [*set.intersection(*map(set, processes.gather([steps])))] if self._of_process else steps

    def ready(self) -> bool:
        """Return True, in every process alike, if a save would begin at once: the one before is written."""
        return processes.everywhere(not self._manager.is_saving_in_progress())

    def save(
        self,
        step: int,
        state: Any,
        extra: Mapping[str, Any],
        in_flight: Sequence[Any] = (),
        best: int | None = None,
    ) -> None:
        """Write in the background; `close` and the next save wait for it. Saving a step that exists does nothing.

        in_flight: trees of arrays beside the state, which who reads only the state need not know.
        best: the step whose checkpoint stays beside the newest.

        Raises:
          OSError: this or an earlier checkpoint could not be written; earlier ones stay intact.
        """
        if step in self._manager.all_steps():
            return
        self._best.step = best
        self.wait()  # or the copy that is written would lie beside another
        state = heap.copied(state)
        begun, extra = (digests_begun(state), digests_begun(in_flight)), copy.deepcopy(dict(extra))

        def payload() -> dict[str, Any]:
            both = {"digests": begun[0]() | begun[1](), "extra": extra}
            return both | {"digest": digest_of_json([both["digests"], both["extra"]])}

        arrays: Any = ocp.args.PyTreeSave if self._of_process else ocp.args.StandardSave
        items: dict[str, Any] = {"state": arrays(state), "payload": ocp.args.JsonSave(payload)}  # pyright: ignore
        if in_flight:
            items["in_flight"] = arrays(in_flight)
        if self._carries_files:  # later rows are cut where they are brought back
            items["files"] = ocp.args.JsonSave(lambda: places.packed_files(self._workdir))  # pyright: ignore

        def write() -> None:
            # Orbax's threads would wait minutes for a folder that could not be made.
            if (self._of_process or jax.process_index() == 0) and isinstance(self.folder, Path):
                os.rmdir(tempfile.mkdtemp(prefix=".writable", dir=self.folder))
            self._manager.save(step, args=ocp.args.Composite(**items))

        self._writing(write)

    def restore(
        self,
        like: Any,
        step: int | None = None,
        note: Callable[[str], None] = lambda line: None,
        in_flight: Callable[[jax.ShapeDtypeStruct], jax.sharding.Sharding] | None = None,
    ) -> tuple[int, Any, dict[str, Any]]:
        """(step, state, extra) of the newest intact checkpoint, or of `step` and no other.

        Args:
          like: a pytree of arrays (or jax.ShapeDtypeStruct with shardings) of the state's structure.
          note: called with a line for every checkpoint that was passed over, and why.
          in_flight: the sharding of an array beside the state, by its shape. Their trees are `extra["in_flight"]`;
            without it they are not read.

        Raises:
          FileNotFoundError: there is no checkpoint, or none of `step`.
          ValueError: no candidate is intact and fits this model and optimizer.
        """
        found = self._found()
        if not found:
            raise FileNotFoundError(f"no checkpoint in {self.folder}; train first with --workdir {self.folder.parent}")
        if step is not None and step not in (steps := [one for one, _ in found]):
            raise FileNotFoundError(
                f"no checkpoint of step {step} in {self.folder}; there are {', '.join(map(str, steps))}"
            )
        wrong = []
        for one, whose in reversed(found):
            if step not in (None, one):
                continue
            try:
                state, extra = _READING["read_state"](whose.folder / str(one), like, in_flight)
            except Exception as error:
                what = "is damaged or does not fit this model and optimizer"
                wrong.append(f"checkpoint {whose.folder / str(one)} {what} ({said_in_one_line(error)})")
                continue
            for reason in wrong:
                note(f"{reason}; going on from step {one}")
            return one, state, extra
        remedy = "use the config that wrote it, or another --workdir"
        raise ValueError("; ".join([*wrong, remedy if step is None else f"give another --step, {remedy}"]))

    def set_aside(self, after: int) -> None:
        """Move the checkpoints later than a step to damaged_checkpoints/, so that their steps can be saved again."""
        if self.near is not None:
            self.near.set_aside(after)
        for step in self._manager.all_steps():
            if step > after and (self._of_process or jax.process_index() == 0):
                place = epath.Path(self.folder.with_name("damaged_checkpoints") / str(step))
                place.rmtree(missing_ok=True)
                place.parent.mkdir(exist_ok=True)
                epath.Path(self.folder / str(step)).rename(place)
        processes.wait_for_all("checkpoints.set_aside")
        self._manager.reload()

    def wait(self) -> None:
        """Wait until everything saved is on disk; raises OSError as `save` does."""
        self._writing(self._manager.wait_until_finished)

    def close(self) -> None:
        if self.near is not None:
            self.near.close()
        self.wait()
        self._manager.close()

    def _writing(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except Exception as error:  # from the writing thread: no room, no permission, a lost disk
            kept = steps_of(self.folder.parent)
            left = f"the one of step {kept[-1]} stays" if kept else "there is none before it"
            raise OSError(
                f"a checkpoint could not be written in {self.folder} ({said_in_one_line(error)}); {left}. Make room, "
                "or let it be written, and give the same command"
            ) from error


@functools.cache
def _quiet() -> None:
    """Let Orbax report a failed write by what it raises alone; its threads print up to 400 lines of tracebacks too, and
    every write of a process by itself that it does not log sizes."""

    def told(record: logging.LogRecord) -> bool:
        return not (_raised_in_orbax(record) or "primary_host=None" in record.getMessage())

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(told)
    shown = sys.unraisablehook

    def show(unraisable: Any) -> None:
        # TensorStore tells each of the writes that are left of a loop that has ended with the first.
        if str(unraisable.exc_value) != "Event loop is closed":
            shown(unraisable)

    sys.unraisablehook = show


def _raised_in_orbax(record: logging.LogRecord) -> bool:
    frames = traceback.walk_tb(record.exc_info[2]) if record.exc_info else ()
    return any("orbax" in frame.f_code.co_filename for frame, _ in frames)


class _Manager(ocp.CheckpointManager):
    """Asks JAX's preemption service nothing: its thread would, about a step that is over, from which it then counts."""

    def reached_preemption(self, step: int) -> bool:
        return False


class _Best(ocp.checkpoint_managers.PreservationPolicy):
    """Keeps the checkpoint of one step, which the run knows. Orbax's BestN has no step for equal values."""

    step: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        return [one.step == self.step for one in checkpoints]


class _Later(ocp.JsonCheckpointHandler):
    """Writes what a function returns, which the writing thread of a primary host calls."""

    async def _save_fn(self, x: Any, directory: Any) -> None:
        writes = self._primary_host in (None, jax.process_index())
        await super()._save_fn(x() if writes else None, directory)


def _of_process(primary: Any) -> ocp.PyTreeCheckpointHandler:
    """Writes every shard that this process holds, also those that another holds too."""
    shards = ocp.type_handlers.ArrayHandler(primary_host=None, replica_id=None, use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, shards))
    return ocp.PyTreeCheckpointHandler(multiprocessing_options=primary, type_handler_registry=registry)
