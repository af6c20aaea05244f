"""The policy of a run's DIR or of a published checkpoint, for generation, evaluation and export."""

import argparse
import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

from jaxrl_llm import models, tasks
from jaxrl_llm.ground import precision, sharding
from jaxrl_llm.ground.json_files import json_object
from jaxrl_llm.run import reopened
from jaxrl_llm.run.assembly import Run


@dataclasses.dataclass(frozen=True)
class LoadedPolicy:
    """A model with its parameters (of a reward model without the head) and its tokenizer.

    run, step and training state are None for a published checkpoint.
    """

    model: models.Model
    params: Any
    tokenizer: tasks.Tokenizer
    run: Run | None = None
    step: int | None = None
    state: Any = None


def from_workdir(
    workdir: str | Path,
    step: int | str | None = None,
    *,
    rewards: bool = False,
    trust: bool = False,
    checkpoints: str = "",
) -> LoadedPolicy:
    """The policy of a DIR at its newest intact checkpoint, at `step` or at the "best"; damaged ones are named on
    standard error.

    trust: run the code that the DIR names, whatever it is. checkpoints: where they are, for a DIR that is not there and
    is then made from them.

    Raises:
        FileNotFoundError, ValueError: see `reopened.restored`; or the DIR holds a reward model and not `rewards`.
    """
    reopened.fetched(workdir, checkpoints)
    run, step, state = reopened.restored(workdir, step, note=functools.partial(print, file=sys.stderr), trust=trust)
    if run.settings.objective.learns_rewards and not rewards:
        raise ValueError(
            f"{workdir} holds a reward model, which judges answers and gives none; name the DIR of a policy, or "
            "evaluate this one without --config"
        )
    return LoadedPolicy(run.model, state.policy.plain(run.model), run.settings.task.tokenizer, run, step, state)


def from_checkpoint(
    path: str | Path, *, tokenizer: str = "", day: str = "", dtype: str | None = None, mesh: Any = None
) -> LoadedPolicy:
    """The policy of a folder in the Hugging Face layout, or of a GGUF file.

    Args:
        tokenizer: its folder, if it is not in the checkpoint.
        day: what a chat template takes for today; "": the present.
        dtype: of parameters and computation; None: as stored.

    Raises:
        FileNotFoundError, ValueError: see `models.load_pretrained` and `tasks.load_tokenizer`; or the path is a DIR.
    """
    record = Path(path) / "config.json"
    if record.is_file() and "config_hash" in json_object(record, "fetch the checkpoint again"):
        raise ValueError(f"--checkpoint={path} is the DIR of a run; give it as --workdir={path}")
    models.published_config(path, dtype)  # a family that is not supported is named before anything else
    own = tasks.load_tokenizer(tokenizer or path, day)
    model, params = models.load_pretrained(path, dtype=dtype, mesh=mesh)
    precision.set_products((model.config.dtype,), sharding.platform(mesh))
    if own.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer of {tokenizer or path} has {own.vocab_size} tokens, the model {model.config.vocab_size}; "
            "use the tokenizer that the checkpoint was trained with"
        )
    return LoadedPolicy(model, params, own)


def from_arguments(
    given: argparse.Namespace, *, tokenizer: str = "", day: str = "", mesh: Any = None, rewards: bool = False
) -> LoadedPolicy:
    """The policy that --workdir or --checkpoint names; `rewards`: or the reward model of a DIR.

    Raises:
        ValueError: an argument that belongs to the other kind is given.
    """
    if given.workdir is None:
        own, other, flags = "a DIR", "--checkpoint", ("step", "trust_code", "checkpoints")
    else:
        own, other, flags = "a --checkpoint", "a DIR", ("dtype",)
    for flag in flags:
        value = getattr(given, flag)
        if value not in (None, "") and value is not False:
            shown = f"--{flag.replace('_', '-')}" + (f"={value}" if value is not True else "")
            raise ValueError(f"{shown} belongs to {own}; leave it out with {other}")
    if given.workdir is not None:
        return from_workdir(
            given.workdir, given.step, rewards=rewards, trust=given.trust_code, checkpoints=given.checkpoints
        )
    return from_checkpoint(given.checkpoint, tokenizer=tokenizer, day=day, dtype=given.dtype, mesh=mesh)
