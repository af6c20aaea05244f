"""Which run a DIR holds, what a new start would erase, and how the recorded run is loaded again.

a DIR without a step            may be overwritten by any config
a DIR with checkpoints          belongs to the config that they say wrote them, whatever config.json says: a start of
                                that config writes a lost or damaged config.json anew
a DIR of another config         is refused; the message has the fields that differ
a DIR whose checkpoints are gone is refused: its logs would be cut back to step 0
--restart                       erases what the DIR holds and starts anew
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from jaxrl_llm.config import loading
from jaxrl_llm.ground import processes
from jaxrl_llm.ground.machine import folder_of_its_own
from jaxrl_llm.records import places
from jaxrl_llm.records.checkpointing import Checkpoints, steps_of
from jaxrl_llm.records.recorded import bring_back, read_record, recorded_config, saved_hash
from jaxrl_llm.records.run_log import plain, read_json, read_rows
from jaxrl_llm.run.assembly import Run, base_digest, build, check_base
from jaxrl_llm.run.settings import config_hash, identity_fields, validate

_SHOWN = 8  # fields that differ


def check(workdir: str | Path, config: ConfigDict, *, restart: bool = False, root: Any = None) -> None:
    """Raises ValueError when the config may not run in this DIR; with `restart` it may in every folder of its own.
    Writes nothing. root: where its checkpoints are, by default where the DIR says."""
    workdir = folder_of_its_own(workdir)
    root = places.root_of(workdir) if root is None else root
    if restart or belongs(workdir, config_hash(config), root):
        return
    recorded = read_record(workdir)
    kept = bool(steps_of(root))
    if not kept and not any(row["step"] > 0 for row in read_rows(workdir / "metrics.jsonl")):
        return
    if recorded is not None and recorded["config_hash"] != config_hash(config):
        # Where the checkpoints say no more than config.json, erasing them is no advice.
        erase = "" if kept and saved_hash(root) is None else ", or erase that run with --restart"
        other = f"give {'' if erase else 'that config or '}another --workdir{erase}"
        raise ValueError(f"{workdir} holds a run of another config ({_differences(recorded, config)}); {other}")
    if recorded is None and kept:
        raise ValueError(
            f"{workdir} has lost its config.json, and its checkpoints were written by another config or cannot be "
            f"read (their config_hash: {saved_hash(root)}, this one's: {config_hash(config)}); give the config that "
            "wrote them, bring config.json back, or give another --workdir"
        )
    if lost := _lost(
        workdir,
        root,
        config.to_dict()["checkpoint"]["every"] if recorded is None else recorded["config"]["checkpoint"]["every"],
    ):
        raise ValueError(
            f"{workdir} has logged steps but no checkpoint any more, and starting again would erase {lost}; bring its "
            "folder checkpoints back, give another --workdir, or erase the run with --restart"
        )


def belongs(workdir: str | Path, identity: str, root: Any = None) -> bool:
    """Whether a DIR's checkpoints say that a config of this hash wrote them.

    Raises:
        ValueError: they say that another did, and config.json has this hash: it was written over.
    """
    saved = saved_hash(workdir if root is None else root)
    if saved in (None, identity):
        return saved is not None
    recorded = read_json(Path(workdir) / "config.json") or {}
    if recorded.get("config_hash") == identity:
        raise ValueError(
            f"{workdir} holds checkpoints of another config (config_hash {saved}) than its config.json, which has this "
            f"one's ({identity}); give the config that wrote them, or another --workdir"
        )
    return False


def begin(workdir: str | Path, *, restart: bool = False, root: Any = None) -> None:
    """Remove an earlier run's files before a start at step 0; the DIR's log must be open, which locks the DIR.

    Args:
      root: where the run's checkpoints go, which the DIR names from now on.
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
        if restart:
            epath.Path(root / "checkpoints").rmtree(missing_ok=True)
            for name in ("evaluation.jsonl", "metrics.jsonl.damaged", "samples.jsonl.damaged"):
                (workdir / name).unlink(missing_ok=True)
        if not steps_of(root):
            epath.Path(root / "reference").rmtree(missing_ok=True)  # the start depends on the config
    processes.wait_for_all("run_dir.begin")
    places.name_place(workdir, root)  # in the DIR of each process, where they have their own


def fetched(workdir: str | Path, checkpoints: str) -> None:
    """Make a DIR that is not there from the PLACE of its checkpoints; nothing without a PLACE.

    Raises:
        FileNotFoundError: no checkpoint there holds the files of a DIR. OSError: the PLACE cannot be read.
    """
    if not checkpoints or (Path(workdir) / "config.json").exists():
        return
    root = places.root_of(workdir, checkpoints)
    if not bring_back(workdir, root):
        raise FileNotFoundError(f"--checkpoints={checkpoints} holds no checkpoint with the files of a DIR")
    places.name_place(workdir, root)


def restored(
    workdir: str | Path, step: int | None = None, note: Callable[[str], None] = print, *, trust: bool = False
) -> tuple[Run, int, Any]:
    """(run, step, state) of a DIR: its own config, its newest intact checkpoint or that of `step`.

    A run of adapters loads its base as a resume does: from the checkpoint that it started from, or from its warm start.
    `note` is called with a line for every damaged checkpoint that was passed over. `trust`: see `recorded_config`.

    Raises:
        FileNotFoundError, ValueError: see `recorded_config`, `validate` and `Checkpoints.restore`.
    """
    config = recorded_config(workdir, trust=trust)
    if not steps_of(workdir):
        raise FileNotFoundError(
            f"no checkpoint in {places.root_of(workdir) / 'checkpoints'}; train first with --workdir {workdir}"
        )
    run = build(validate(config), trains=False)
    like = run.start(note) if run.settings.lora.rank else run.blank()
    checkpoints = Checkpoints(workdir, run.settings.checkpoint.keep)
    step, saved, extra = checkpoints.restore(like.saved(), step, note)
    check_base(base_digest(like), extra)
    return run, step, like.restored(saved)


def _lost(workdir: Path, root: Any, every: int) -> str:
    """What a start from step 0 would erase in a DIR whose checkpoints are gone; empty if nothing of value.

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


def _differences(recorded: dict[str, Any], new: ConfigDict) -> str:
    """`block.field: old -> new` of the fields that identify a run."""
    before, after = (loading.flat(identity_fields(plain(one))) for one in (recorded["config"], new.to_dict()))
    if used := recorded.get("reward_model"):  # its DIR may have gone on since
        before["rewards.reward_model"] = [used["step"], used["digest"]]
    changed = [key for key in before | after if before.get(key, "absent") != after.get(key, "absent")]
    shown = [f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}" for key in changed[:_SHOWN]]
    more = [f"and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
    return ", ".join(shown + more) or "its fields are equal, but its config_hash was changed"
