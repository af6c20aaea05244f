"""Which tensors of a published checkpoint make up which array of ours: the one table of names.

Linear weights are stored [out, in] and transposed here; layers and experts are stored apart and stacked here. Names of
parts of a tensor are read and written by `tensor_parts`.
"""

import dataclasses
import math
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models.checkpoints.family_table import FAMILIES
from jaxrl_llm.models.checkpoints.gguf_file import GGUFTensor
from jaxrl_llm.models.checkpoints.pretrained_config import family_of
from jaxrl_llm.models.checkpoints.safetensors_files import FileTensor
from jaxrl_llm.models.transformer import Model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ENDS = {("embedding",): EMBEDDING, ("norm", "scale"): "model.norm.weight", ("head",): HEAD}
_LAYER = {
    ("attention_norm", "scale"): "input_layernorm.weight",
    ("mlp_norm", "scale"): "post_attention_layernorm.weight",
    **{("attention", name): f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{("attention", f"{name}_bias"): f"self_attn.{name}_proj.bias" for name in "qkvo"},
    ("attention", "sinks"): "self_attn.sinks",
    **{("attention", f"{name}_norm", "scale"): f"self_attn.{name}_norm.weight" for name in "qk"},
    **{("mlp", name): f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}
_EXPERTS = {("mlp", "router"): "mlp.gate.weight"} | {
    ("mlp", name): f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")
}
StoredTensor = FileTensor | GGUFTensor  # read in strips of its first axis
_ROWS = 64  # rows of a matrix transposed at a time: a strip that fits the processor's cache


@dataclasses.dataclass(frozen=True)
class Stacked:
    """One of our arrays. names: its tensors over its leading (layer, expert) axes; the other axes are each tensor's."""

    names: np.ndarray
    shape: tuple[int, ...]
    dtype: Any

    @property
    def own(self) -> tuple[int, ...]:
        return self.shape[self.names.ndim :]

    @property
    def transposed(self) -> bool:
        return len(self.own) == 2 and self.names.flat[0] != EMBEDDING

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of each tensor in the file."""
        return self.own[::-1] if self.transposed else self.own

    def read(self, tensors: Mapping[str, StoredTensor], index: tuple[slice, ...], pool: Executor) -> np.ndarray:
        """The part of the array that `index` selects, read in strips: little more than the result is in memory.

        Raises ValueError, with the name of the tensor, for a weight that is not finite.
        """
        lead = self.names.ndim
        names = self.names[(*index[:lead], ...)]
        bounds = [s.indices(n)[:2] for s, n in zip(index[lead:], self.own, strict=True)]
        out = _aligned((*names.shape, *(stop - start for start, stop in bounds)), np.dtype(self.dtype))
        (first, last), *columns = bounds[::-1] if self.transposed else bounds  # in the layout of the file

        infinite = _bits(np.array(np.inf, self.dtype))  # the bits that are set in every number that is not finite

        def fill(place: tuple[int, ...]) -> None:
            into = _bits(out[place].T if self.transposed else out[place])
            for start in range(first, last, _ROWS) if columns else [first]:
                stop = min(start + _ROWS, last) if columns else last
                strip = tensors[str(names[place])].rows(start, stop)[(slice(None), *(slice(*c) for c in columns))]
                bits = _bits(strip.astype(self.dtype, copy=False))
                if np.max(bits & infinite) == infinite:
                    raise ValueError(
                        f"{names[place]} holds weights that are not finite (NaN or infinity), which makes every answer "
                        "wrong; fetch the checkpoint again, or take one from before its training diverged"
                    )
                into[start - first : stop - first] = bits

        list(pool.map(fill, np.ndindex(names.shape)))
        return out


def stacked_arrays(model: Model, given: str = "") -> dict[str, Stacked]:
    """Every array of the model in tree order, by its path, with the names of the tensors that it is made of.

    given: the model_type of the file, if there is one.
    """
    config, arrays = model.config, {}
    family = FAMILIES[family_of(config, given)]
    layer = {**_LAYER, **(family.tensors(config) if callable(family.tensors) else family.tensors)}
    experts = {**layer, **_EXPERTS, **family.expert_tensors}
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        part, *keys = (entry.key for entry in path)
        if part == "ends":
            names = np.array(_ENDS[tuple(keys)], dtype=object)
        else:
            name = (experts if part.endswith("moe") else layer)[tuple(keys)]
            listed: list[Any] = [f"model.layers.{i}.{name}" for i, kind in enumerate(config.kinds) if kind == part]
            if "{expert" in name:
                listed = [[one.format(expert=e) for e in range(config.num_experts)] for one in listed]
            names = np.array(listed, dtype=object)
        arrays[jax.tree_util.keystr(path)] = Stacked(names, leaf.shape, leaf.dtype)
    return arrays


def _bits(x: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers, which numpy copies several times faster than bfloat16."""
    return x.view(f"u{x.dtype.itemsize}")


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that a CPU device uses without a copy (jax aliases arrays aligned to 64 bytes)."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
