"""The record of a run in its DIR, and which of its checkpoints is the newest."""

import contextlib
import os
from pathlib import Path
from typing import Any

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.machine import refuse_links
from jaxrl_llm.records import places
from jaxrl_llm.records.checkpointing import steps_of
from jaxrl_llm.records.run_log import read_json, read_rows

_READING = ByName(
    {
        "saved_files": "jaxrl_llm.records.checkpoint_reader",
        "saved_payload": "jaxrl_llm.records.checkpoint_reader",
    }
)
FORMAT = 2  # of a DIR; goes up when fields of configs or arrays of checkpoints change


def read_record(workdir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return config.json, None if there is none. Raises ValueError if it is damaged or of a DIR of another format."""
    record = read_json(Path(workdir) / "config.json")
    if record is not None and not (
        isinstance(record.get("config"), dict)
        and {"task", "objective", "optimizer", "warm_start", "checkpoint"} <= record["config"].keys()
        and "config_hash" in record
    ):
        raise ValueError(
            f"{workdir}/config.json lacks what a run records in it; bring it back from a copy, or remove it: where "
            "there are checkpoints, the command that trained them writes it anew"
        )
    if record is not None and record.get("format") != FORMAT:
        raise ValueError(
            f"{workdir} was made by commit {record.get('commit')}, whose format this version does not read; open it "
            "with that commit, or give another --workdir"
        )
    return record


def bring_back(workdir: str | os.PathLike[str], root: Any) -> str:
    """Give a DIR that has lost its files, or has no row of the newest checkpoint in its PLACE, those of the checkpoint.

    Returns what is to be said of it, "" where nothing was brought. Raises OSError if the PLACE cannot be read.
    """
    if not places.is_elsewhere(workdir, root):
        return ""
    refuse_links(Path(workdir))
    last = max((row["step"] for row in read_rows(Path(workdir) / "metrics.jsonl")), default=-1)
    for step in reversed([step for step in steps_of(root) if step > last]):
        with contextlib.suppress(ValueError):
            places.unpack_files(workdir, _READING["saved_files"](root, step))
            return f"{workdir} has its files of step {step} back from {root}"
    return ""


def checkpoint_identity(workdir: str | os.PathLike[str]) -> tuple[int, str]:
    """(step, digest) of the newest checkpoint of a DIR: of its parameters and of the config that it belongs to."""
    steps = steps_of(workdir)
    if not steps:
        raise FileNotFoundError(f"{workdir} holds no checkpoint of a run")
    return steps[-1], _READING["saved_payload"](workdir, steps[-1])["digest"]


def newest_checkpoint(workdir: str | os.PathLike[str]) -> str:
    """Which checkpoint of a DIR this process sees as the newest: "step 40, DIGEST", or "none". It writes nothing and
    waits for no other process."""
    try:
        return "step {}, {}".format(*checkpoint_identity(workdir))
    except FileNotFoundError:
        return "none"
    except ValueError:  # the restore names the damage
        return f"step {steps_of(workdir)[-1]}, damaged"


def saved_hash(workdir: str | os.PathLike[str]) -> str | None:
    """The hash of the config that wrote the newest checkpoint of a DIR that can be read; None if there is none."""
    return _saved(workdir, "config_hash")


def first_day(workdir: str | os.PathLike[str], root: Any) -> str:
    """The day of a run's first start, YYYY-MM-DD, by its checkpoints or config.json; "" if its prompts name none."""
    day = _saved(root, "day")
    with contextlib.suppress(ValueError):  # a damaged config.json
        day = day or ((read_record(workdir) or {"config": {"task": {}}})["config"]["task"].get("date"))
    return day or ""


def _saved(workdir: str | os.PathLike[str], name: str) -> Any:
    """Return the caller's entry in the newest checkpoint that can be read; None if there is none."""
    for step in reversed(steps_of(workdir)):
        with contextlib.suppress(ValueError):
            return _READING["saved_payload"](workdir, step)["extra"].get(name)
    return None
