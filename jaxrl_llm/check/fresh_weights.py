"""A checkpoint's tokenizer before fresh weights, which few people mean: a warning, and on a terminal a question."""

import sys
from collections.abc import Mapping
from pathlib import Path

from jaxrl_llm.ground import hub_names
from jaxrl_llm.run.settings import Settings


def doubts(s: Settings) -> dict[str, str]:
    """{"fresh_weights": text} if `task.tokenizer` names a checkpoint and `model.pretrained` none, else {}.

    A folder with tokenizer.json alone is no checkpoint: config.json describes a model.
    """
    place = s.tokenizer
    if s.pretrained or not place or not _names_a_checkpoint(place):
        return {}
    return {
        "fresh_weights": f"task.tokenizer={place} is the tokenizer of a checkpoint, and model.pretrained is empty: the "
        f"run trains fresh weights of {s.model.num_hidden_layers} layers, and none of the checkpoint's; to train the "
        f"checkpoint, give --config pretrained --config.model.pretrained={place}, to train a small model from nothing, "
        "leave task.tokenizer empty"
    }


def _names_a_checkpoint(place: str) -> bool:
    return hub_names.is_name(place) or Path(place).is_file() or Path(place, "config.json").exists()


def confirm(warnings: Mapping[str, str]) -> None:
    """Ask on a terminal before fresh weights are trained so; elsewhere the warning alone is printed.

    Raises:
      ValueError: the answer is not yes.
    """
    doubt = warnings.get("fresh_weights")
    if doubt is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    print(f"warning fresh_weights: {doubt}")
    try:
        answer = input("train fresh weights? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise ValueError("not started: the weights would be fresh; the lines above say how to train the checkpoint")
