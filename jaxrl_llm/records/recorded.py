"""What a DIR says of the run that it holds: the config that was recorded, and which checkpoint is the newest."""

import contextlib
import os
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm import objectives, tasks
from jaxrl_llm.config import loading, versions
from jaxrl_llm.records import own_code, places
from jaxrl_llm.records.checkpointing import saved_files, saved_payload, steps_of
from jaxrl_llm.records.run_log import read_json, read_rows


def read_record(workdir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """config.json, if there is one. Raises ValueError if it is not what a run writes."""
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
    return record


def recorded_config(
    workdir: str | os.PathLike[str], *, trust: bool = False, remedy: str = own_code.REMEDY
) -> ConfigDict:
    """The config of the run that a DIR holds; tasks and objectives that its config's file registers are known then.

    Args:
        trust: run whatever code the DIR names; otherwise only what `own_code` knows to be the user's own.
        remedy: how the user may have it run, for the message.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: config.json is damaged, the file of the config is gone or no longer fits, or the DIR names code that
            may not run.
    """
    record = read_record(workdir)
    if record is None:
        raise FileNotFoundError(f"{workdir} holds no run (no config.json); give --workdir of a run")
    config = record["config"]
    known = config["task"]["name"] in tasks.names() and config["objective"]["name"] in objectives.names()
    source = loading.Source(**record["source"]) if not known and "source" in record else None
    if not trust:
        own = [Path(source.file).resolve()] if source is not None and Path(source.file).exists() else []
        files = [*own, *own_code.verifier_files(config["task"].get("options"))]
        own_code.check(workdir, files, record.get("code"), remedy)
    if source is not None:
        if not Path(source.file).exists():
            raise FileNotFoundError(
                f"{source.file}, which registers task {config['task']['name']!r} and objective "
                f"{config['objective']['name']!r} of {workdir}, is gone; bring it back, or write its new place into "
                f"{workdir}/config.json, at source.file"
            )
        loading.load(source)
    return ConfigDict(versions.as_today(config, f"{workdir}/config.json"))


def bring_back(workdir: str | os.PathLike[str], root: Any) -> str:
    """Give a DIR that has lost its files, or has no row of the newest checkpoint in its PLACE, those of the checkpoint.

    Returns what is to be said of it, "" where nothing was brought. Raises OSError if the PLACE cannot be read.
    """
    if not places.is_elsewhere(workdir, root):
        return ""
    last = max((row["step"] for row in read_rows(Path(workdir) / "metrics.jsonl")), default=-1)
    for step in reversed([step for step in steps_of(root) if step > last]):
        with contextlib.suppress(ValueError):
            places.unpack_files(workdir, saved_files(root, step))
            return f"{workdir} has its files of step {step} back from {root}"
    return ""


def checkpoint_identity(workdir: str | os.PathLike[str]) -> tuple[int, str]:
    """(step, digest) of the newest checkpoint of a DIR: of its parameters and of the config that it belongs to."""
    steps = steps_of(workdir)
    if not steps:
        raise FileNotFoundError(f"{workdir} holds no checkpoint of a run")
    return steps[-1], saved_payload(workdir, steps[-1])["digest"]


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
    for step in reversed(steps_of(workdir)):
        with contextlib.suppress(ValueError):
            return saved_payload(workdir, step)["extra"].get("config_hash")
    return None
