"""The config of the run that a DIR holds, and its best checkpoint, for what opens the run again."""

import contextlib
import os
from pathlib import Path

from ml_collections import ConfigDict

from jaxrl_llm import objectives, tasks
from jaxrl_llm.config import loading
from jaxrl_llm.records import own_code
from jaxrl_llm.records.checkpoint_reader import saved_payload
from jaxrl_llm.records.checkpointing import steps_of
from jaxrl_llm.records.recorded import read_record


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
        files = [*own, *own_code.verifier_files(own_code.naming(config))]
        own_code.check(workdir, files, record.get("code"), remedy)
    if source is not None:
        if not Path(source.file).exists():
            raise FileNotFoundError(
                f"{source.file}, which registers task {config['task']['name']!r} and objective "
                f"{config['objective']['name']!r} of {workdir}, is gone; bring it back, or write its new place into "
                f"{workdir}/config.json, at source.file"
            )
        loading.load(source)
    return ConfigDict(config)


def best_step(workdir: str | os.PathLike[str]) -> int:
    """The step of the best checkpoint of a DIR, as the newest one that can be read knows it.

    Raises:
      FileNotFoundError: the run keeps none.
    """
    steps = steps_of(workdir)
    for step in reversed(steps):
        with contextlib.suppress(ValueError):
            if (best := (saved_payload(workdir, step)["extra"].get("best") or {}).get("step")) is not None:
                return best
            break
    there = f"give --step={' or '.join(map(str, steps))}" if steps else "train first"
    raise FileNotFoundError(
        f"{workdir} keeps no best checkpoint, which takes checkpoint.best and an evaluation; {there}"
    )
