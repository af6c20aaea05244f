"""The run that a DIR holds, loaded again from what it recorded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_llm.records import places
from jaxrl_llm.records.checkpointing import Checkpoints, steps_of
from jaxrl_llm.records.recorded import bring_back
from jaxrl_llm.records.recorded_config import best_step, recorded_config
from jaxrl_llm.run.assembly import Run, base_digest, build, check_base
from jaxrl_llm.run.settings import validate


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
    workdir: str | Path, step: int | str | None = None, note: Callable[[str], None] = print, *, trust: bool = False
) -> tuple[Run, int, Any]:
    """(run, step, state) of a DIR: its own config, its newest intact checkpoint, that of `step` or the "best".

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
    step = best_step(workdir) if isinstance(step, str) else step
    step, saved, extra = checkpoints.restore(like.saved(), step, note)
    check_base(base_digest(like), extra)
    return run, step, like.restored(saved)
