"""Which run a DIR holds, and what a new start would erase.

a DIR without a step            may be overwritten by any config
a DIR with checkpoints          belongs to the config that they say wrote them: a start of that config writes a lost
                                or damaged config.json anew
a DIR of another config         is refused; the message has the fields that differ
a DIR whose checkpoints are gone is refused: its logs would be cut back to step 0
--restart                       erases what the DIR holds and starts anew
"""

from pathlib import Path
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from jaxrl_llm.config import loading
from jaxrl_llm.ground import processes
from jaxrl_llm.ground.machine import folder_of_its_own
from jaxrl_llm.records import places
from jaxrl_llm.records.checkpointing import steps_of
from jaxrl_llm.records.recorded import first_day, read_record, saved_hash
from jaxrl_llm.records.run_log import plain, read_rows
from jaxrl_llm.run.settings import config_hash, identity_fields

_SHOWN = 8  # fields that differ


def check(
    workdir: str | Path, config: ConfigDict, *, restart: bool = False, root: Any = None, given: bool = False
) -> None:
    """Raises ValueError when the config may not run in this DIR; with `restart` it may in every folder of its own.
    Writes nothing.

    Args:
      root: where its checkpoints are, by default where the DIR says.
      given: the command names that PLACE, see `places.refused`.
    """
    workdir = folder_of_its_own(workdir)
    root = places.root_of(workdir) if root is None else root
    if places.is_elsewhere(workdir, root):
        own = [places.refused(workdir, root, given=given) if jax.process_index() == 0 else ""]
        if said := processes.gather(own)[0]:
            processes.refuse(said)
    identity, saved = config_hash(config), saved_hash(root)
    if restart or saved == identity:
        return
    recorded, kept = read_record(workdir), bool(steps_of(root))
    if not kept and not any(row["step"] > 0 for row in read_rows(workdir / "metrics.jsonl")):
        return
    if saved is not None or (recorded is None and kept) or (recorded or {}).get("config_hash", identity) != identity:
        differ = _differences(recorded, config) if recorded else ["config.json is lost"]
        shown = ", ".join(differ) or "its fields are equal"
        if not recorded or not differ:
            shown += f"; its checkpoints have config_hash {saved}, this config {identity}"
        remedy = "give that config or another --workdir"
        if recorded and (saved or not kept):  # otherwise the checkpoints may be those of the config
            remedy += ", or erase that run with --restart"
        if len(differ) == 1 and differ[0].startswith("steps: "):
            schedule = config.to_dict()["optimizer"]["schedule"]
            remedy = (
                f"with optimizer.schedule={schedule} every rate depends on `steps`, which only "
                "optimizer.schedule=constant lets grow: give the old number, or train on from an export of this run "
                "(model.pretrained) in another --workdir"
            )
        raise ValueError(f"{workdir} holds a run of another config ({shown}); {remedy}")
    every = (recorded["config"] if recorded else config.to_dict())["checkpoint"]["every"]
    if lost := _lost(workdir, root, every):
        raise ValueError(
            f"{workdir} has logged steps but no checkpoint any more, and starting again would erase {lost}; bring its "
            "folder checkpoints back, give another --workdir, or erase the run with --restart"
        )


def keep_day(workdir: str | Path, config: Any, root: Any) -> bool:
    """Give the config the day of the DIR's first start, which its prompts may name; True if it had another.

    Raises:
        ValueError: the config sets another day.
    """
    begun = steps_of(root) or any(row["step"] > 0 for row in read_rows(Path(workdir) / "metrics.jsonl"))
    given, day = config.task.date, first_day(workdir, root)
    if given and not begun:  # whatever a start without a step has recorded
        return False
    if day and given not in ("", day):
        raise ValueError(
            f"task.date={given!r}, and the prompts of {workdir} name {day}; leave task.date empty, give another "
            "--workdir, or erase that run with --restart"
        )
    config.task.date = day or given
    return config.task.date != given


def begin(workdir: str | Path, *, restart: bool = False, root: Any = None) -> None:
    """Remove an earlier run's files before a start at step 0; the DIR's log must be open, which locks the DIR.

    Args:
      root: where the run's checkpoints go, which the DIR names from now on; `check` has found that it may.
    """
    workdir = Path(workdir)
    root = places.root_of(workdir) if root is None else root
    if not places.is_elsewhere(workdir, root) and not processes.share_folder(workdir):
        processes.refuse(
            f"{workdir} is not one folder of all processes: what process 0 writes there is not seen by all; give "
            "--checkpoints PLACE that they share, or give a --workdir that they share"
        )
    if restart:
        epath.Path(workdir / "local" / str(jax.process_index())).rmtree(missing_ok=True)
    if jax.process_index() == 0:
        places.name_place(workdir, root)
        if places.is_elsewhere(workdir, root):
            places.claim(workdir, root)
        if restart:
            epath.Path(root / "checkpoints").rmtree(missing_ok=True)
            for name in ("evaluation.jsonl", "metrics.jsonl.damaged", "samples.jsonl.damaged"):
                (workdir / name).unlink(missing_ok=True)
        if not steps_of(root):
            epath.Path(root / "reference").rmtree(missing_ok=True)  # the start depends on the config
    processes.wait_for_all("run_dir.begin")
    places.name_place(workdir, root)  # in the DIR of each process, where they have their own


def _lost(workdir: Path, root: Any, every: int) -> str:
    """Return what a start from step 0 would erase in a DIR whose checkpoints are gone; empty if nothing of value.

    A run that was killed before its first checkpoint was complete has rows too, but not those of two checkpoint
    intervals: the second checkpoint starts after the first is complete.
    """
    if steps_of(root) or steps_of(workdir / "local" / "0"):
        return ""
    rows = read_rows(workdir / "metrics.jsonl")
    finished = (workdir / "result.json").exists()
    had = bool(rows) and rows[-1]["step"] > 2 * every
    if (root / "checkpoints").is_dir() and not (finished or had):
        return ""
    samples = len(read_rows(workdir / "samples.jsonl"))
    what = [f"{len(rows)} rows of metrics.jsonl", f"{samples} of samples.jsonl", "the TensorBoard events"]
    return ", ".join(what + ["result.json"] * finished)


def _differences(recorded: dict[str, Any], new: ConfigDict) -> list[str]:
    """`block.field: old -> new` of the fields that identify a run and differ."""
    before, after = (loading.flat(identity_fields(plain(one))) for one in (recorded["config"], new.to_dict()))
    if used := recorded.get("reward_model"):  # its DIR may have gone on since
        before["rewards.reward_model"] = [used["step"], used["digest"]]
    if used := recorded.get("teacher"):
        before["teacher.path"] = used["identity"]
    changed = [key for key in before | after if before.get(key, "absent") != after.get(key, "absent")]
    shown = [f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}" for key in changed[:_SHOWN]]
    more = [f"and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
    return shown + more
