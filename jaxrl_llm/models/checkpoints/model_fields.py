"""The fields of a run's model block, completed from the checkpoint that it starts from and checked against it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.checkpoints.pretrained_config import from_published
from jaxrl_llm.models.checkpoints.published import read_published

_OF_THE_RUN = ("param_dtype", "dtype", "remat", "experts_implementation", "attention_implementation")
_OF_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")


def complete_fields(given: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Every field of a ModelConfig, from the `model` block of a run.

    A field that is None is that of the checkpoint at given["pretrained"]. A field that is set must equal it, but for
    those that say how the run computes. Without a checkpoint `tokens`, the tokenizer's, is the default of vocab_size.

    Raises:
      FileNotFoundError, ValueError: the checkpoint is missing or of an unsupported kind, contradicts a field, or has a
        smaller vocabulary than the tokenizer; or a field is None without a checkpoint.
    """
    fields = {name: value for name, value in given.items() if name != "pretrained"}
    path = given["pretrained"]
    if not isinstance(path, str):
        raise ValueError(f"model.pretrained={path!r} must be the path of a checkpoint, or '' for fresh parameters")
    if path:
        dtype = fields.get("param_dtype")
        published = from_published(read_published(path).config, fields.get("dtype") if dtype is None else dtype, path)
        fields |= {name: getattr(published, name) for name, value in fields.items() if value is None}
        _check_agreement(path, fields, published)
    elif fields.get("vocab_size") is None:
        fields["vocab_size"] = tokens
    absent = sorted(name for name, value in fields.items() if value is None)
    if absent:
        raise ValueError(
            f"model.{absent[0]}=None is taken from a checkpoint, and there is none: set model.pretrained to its path, "
            f"or set {', '.join(f'model.{name}' for name in absent)}"
        )
    if isinstance(fields["vocab_size"], int) and fields["vocab_size"] < tokens:
        raise ValueError(
            f"model.vocab_size={fields['vocab_size']} is less than the tokenizer's {tokens} tokens; "
            "use the tokenizer of the checkpoint, or set it to None"
        )
    return fields


def _check_agreement(path: str, fields: Mapping[str, Any], published: ModelConfig) -> None:
    kinds = published.kinds
    free = {*_OF_THE_RUN} | (set() if "moe" in kinds else {*_OF_EXPERTS})
    free |= set() if "dense" in kinds else {"intermediate_size"}
    differ = [
        f"model.{name}={fields[name]!r} (the checkpoint: {theirs!r})"
        for name, theirs in dataclasses.asdict(published).items()
        if name in fields and name not in free and _plain(fields[name]) != theirs
    ]
    if differ:
        raise ValueError(
            f"model.pretrained={path!r} contradicts {', '.join(differ)}; set them to None, as configs/pretrained.py "
            "does, or to the checkpoint's values"
        )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
