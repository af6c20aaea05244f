"""The language model inside of a checkpoint that reads pictures too (Qwen3.5). Loaded where a config.json has one."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.checkpoints.safetensors_files import FileTensor

_BESIDE = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
_WITHIN, _PICTURES = "model.language_model.", "model.visual."
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def language_config(published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the language model alone, whose model_type ends in `_text`."""
    kept = {name: published[name] for name in _BESIDE if name in published}
    return {**kept, **published["text_config"], "model_type": f"{published['model_type']}_text"}


def language_tensors(tensors: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Return the tensors of the language model alone, by the names of a checkpoint without pictures, in which each
    expert has its own."""
    found = {}
    for name, tensor in tensors.items():
        name = f"model.{name.removeprefix(_WITHIN)}" if name.startswith(_WITHIN) else name
        place, _, part = name.rpartition(".")
        if part in _EXPERTS and len(tensor.shape) == 3:
            found |= _by_expert(place, tensor, _EXPERTS[part])
        elif not name.startswith(_PICTURES):
            found[name] = tensor
    return found


def _by_expert(place: str, tensor: FileTensor, parts: tuple[str, ...]) -> dict[str, FileTensor]:
    """The parts of the rows of every expert in one tensor [experts, rows, columns]."""
    experts, rows, columns = tensor.shape
    shape = rows // len(parts), columns
    size = math.prod(shape) * tensor.dtype.itemsize
    names = itertools.product(range(experts), parts)
    return {
        f"{place}.{expert}.{part}.weight": FileTensor(tensor.file, tensor.offset + at * size, shape, tensor.dtype)
        for at, (expert, part) in enumerate(names)
    }
