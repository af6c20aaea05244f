"""The fields of a run's model block, completed from the checkpoint that it starts from and checked against it."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models.architecture import OF_THE_RUN, ModelConfig

# A run from fresh parameters reads no checkpoint.
_READ = ByName(
    {
        "from_published": "jaxrl_llm.models.checkpoints.pretrained_config",
        "read_config": "jaxrl_llm.models.checkpoints.published",
    }
)


def published_config(path: str | os.PathLike[str], dtype: str | None = None) -> ModelConfig:
    """The architecture of a checkpoint from its config.json alone, so that no weights of another family are fetched.

    Raises:
      FileNotFoundError, ValueError: as `load_pretrained`.
    """
    return _READ["from_published"](_READ["read_config"](path), dtype, path)


def complete_fields(given: Mapping[str, Any], tokens: int, *, frozen: bool = False) -> dict[str, Any]:
    """Every field of a ModelConfig, from the `model` block of a run.

    A field that is None is that of the checkpoint at given["pretrained"], but for `param_dtype`: parameters that are
    trained are float32 whatever the file's type, those that stay `frozen` are as stored. A field that is set must equal
    the checkpoint's, but for those that say how the run computes. Without a checkpoint `tokens`, the tokenizer's, is
    the default of vocab_size.

    Raises:
      FileNotFoundError, ValueError: the checkpoint is missing or of an unsupported kind, contradicts a field, or has a
        smaller vocabulary than the tokenizer; or a field is None without a checkpoint.
    """
    fields = {name: value for name, value in given.items() if name != "pretrained"}
    path = given["pretrained"]
    if not isinstance(path, str):
        raise ValueError(f"model.pretrained={path!r} must be the path of a checkpoint, or '' for fresh parameters")
    if path:
        published = published_config(path, fields.get("dtype"))
        kept = dataclasses.replace(published, param_dtype=stored_dtype(path) if frozen else "float32")
        fields |= {name: getattr(kept, name) for name, value in fields.items() if value is None}
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


def stored_dtype(path: str) -> str:
    """The type that keeps the parameters of a checkpoint as they are stored: bfloat16 if it says so, else float32."""
    published = _READ["read_config"](path)
    return "bfloat16" if (published.get("dtype") or published.get("torch_dtype")) == "bfloat16" else "float32"


def _check_agreement(path: str, fields: Mapping[str, Any], published: ModelConfig) -> None:
    free = {*OF_THE_RUN, *published.of_no_layer} - {"num_experts"}
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
