"""Published Qwen3 and Qwen3-MoE checkpoints (safetensors) <-> the parameters of `Model`.

One table says which tensors of the files make up which array of ours. Linear weights are stored [out, in] and
transposed here; layers and experts are stored apart and stacked here. Each device's part of an array is read on its
own, tensor by tensor: no process holds more of the checkpoint than one array of one device beside what it loaded.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxrl_llm import sharding
from jaxrl_llm.array_typing import Params
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.pretrained_config import from_published, to_published
from jaxrl_llm.models.transformer import Model

__all__ = ["load_pretrained", "save_pretrained"]

_SINGLE, _INDEX, _HEAD = "model.safetensors", "model.safetensors.index.json", "lm_head.weight"
_ENDS = {("embedding",): "model.embed_tokens.weight", ("norm", "scale"): "model.norm.weight", ("head",): _HEAD}
_LAYER = {
    ("attention_norm", "scale"): "input_layernorm.weight",
    ("mlp_norm", "scale"): "post_attention_layernorm.weight",
    **{("attention", name): f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{("attention", f"{name}_norm", "scale"): f"self_attn.{name}_norm.weight" for name in "qk"},
}
_MLP = {
    "dense": {("mlp", name): f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "moe": {("mlp", "router"): "mlp.gate.weight"}
    | {("mlp", name): f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")},
}


@dataclasses.dataclass(frozen=True)
class _Array:
    """One of our arrays: tensor names over its leading (layer, expert) axes; the rest is one tensor's own axes."""

    names: np.ndarray
    shape: tuple[int, ...]
    dtype: Any

    @property
    def own(self) -> tuple[int, ...]:
        return self.shape[self.names.ndim :]

    @property
    def transposed(self) -> bool:
        return len(self.own) == 2 and self.names.flat[0] != _ENDS["embedding",]

    @property
    def stored(self) -> tuple[int, ...]:
        return self.own[::-1] if self.transposed else self.own

    def read(self, files: Mapping[str, Any], index: tuple[slice, ...]) -> np.ndarray:
        """The part of the array that `index` selects; reads that part of the files only."""
        lead = self.names.ndim
        names = self.names[(*index[:lead], ...)]
        rest = tuple(slice(*s.indices(n)) for s, n in zip(index[lead:], self.own, strict=True))
        out = np.empty((*names.shape, *(s.stop - s.start for s in rest)), self.dtype)
        for place in np.ndindex(names.shape):
            name = str(names[place])
            tensor = files[name].get_slice(name)[rest[::-1] if self.transposed else rest]
            out[place] = tensor.T if self.transposed else tensor
        return out


def load_pretrained(
    path: str | os.PathLike[str], *, dtype: str | None = None, mesh: jax.sharding.Mesh | None = None
) -> tuple[Model, dict[str, Any]]:
    """The model and the parameters of a checkpoint in Hugging Face's Qwen3 or Qwen3-MoE layout.

    Args:
      path: a folder with config.json and model.safetensors, or shards and model.safetensors.index.json.
      dtype: float32 or bfloat16, of parameters and computation; default: that of config.json.
      mesh: parameters are born on it; every process reads what its own devices hold.

    Raises:
      FileNotFoundError: no such folder, or a file of it is missing.
      ValueError: an architecture that this model does not compute; tensors missing, left over or of another shape.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"path={str(path)!r} is not a folder. Nothing is downloaded from here: fetch the checkpoint (config.json "
            "and *.safetensors) by other means and pass the folder that holds it"
        )
    model = Model(from_published(json.loads(_existing(folder / "config.json").read_text()), dtype), mesh)
    arrays = _arrays(model)
    with contextlib.ExitStack() as stack:
        files = _open(folder, stack)
        _check(files, list(arrays.values()), tied=model.config.tie_word_embeddings)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        where = _flat(sharding.shardings(model.axes(), shapes, mesh)) if mesh is not None else {}
        loaded = {}
        for key, array in arrays.items():
            if mesh is None:
                loaded[key] = jnp.asarray(array.read(files, (slice(None),) * len(array.shape)))
            else:
                read = lambda index, array=array: array.read(files, index)  # noqa: E731
                loaded[key] = jax.make_array_from_callback(array.shape, where[key], read)
    return model, jax.tree.unflatten(jax.tree.structure(shapes), list(loaded.values()))


def save_pretrained(
    params: Params, config: ModelConfig, path: str | os.PathLike[str], *, shard_bytes: int = 4 * 2**30
) -> None:
    """Write parameters so that `load_pretrained`, or Hugging Face's Qwen3 and Qwen3-MoE classes, read them back.

    Args:
      params: of `Model(config)`, stacked; every array addressable by this process.
      path: a folder without a checkpoint; made if need be.
      shard_bytes: files stay below this size where a single tensor allows it; more than one file gets an index.

    Raises:
      FileExistsError: the folder holds a checkpoint already.
      ValueError: params are not those of `config`.
    """
    folder = Path(path)
    if any(folder.glob("*.safetensors")) or (folder / "config.json").exists():
        raise FileExistsError(f"path={str(path)!r} holds a checkpoint already; give an empty folder")
    arrays, leaves = _arrays(Model(config)), _flat(params)
    wrong = {key for key in arrays if key not in leaves or leaves[key].shape != arrays[key].shape}
    if wrong or len(leaves) != len(arrays):
        raise ValueError(f"params are not those of this config: {_some(wrong or set(leaves) - set(arrays))} differ")
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(arrays, shard_bytes))
    names = [_SINGLE] if len(shards) == 1 else [_of(i, len(shards)) for i in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        save_file(
            {array.names[place]: _tensor(leaves[key], array, place) for key, array, place in shard},
            folder / file,
            metadata={"format": "pt"},
        )
    if len(shards) > 1:
        weight_map = {array.names[place]: f for f, s in zip(names, shards, strict=True) for _, array, place in s}
        size = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays.values())
        _write_json(folder / _INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    _write_json(folder / "config.json", to_published(config))  # last: without it the folder does not load


def _flat(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _arrays(model: Model) -> dict[str, _Array]:
    """Every array of the model in tree order, with the names of the tensors that it is made of."""
    config, arrays = model.config, {}
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        part, *keys = (entry.key for entry in path)
        if part == "ends":
            names = np.array(_ENDS[tuple(keys)], dtype=object)
        else:
            layers = [layer for layer, kind in enumerate(config.kinds) if kind == part]
            name = (_LAYER | _MLP[part])[tuple(keys)]
            experts = range(config.num_experts) if "{expert}" in name else None
            one = lambda layer, expert, name=name: f"model.layers.{layer}.{name.format(expert=expert)}"  # noqa: E731
            grid = [one(l, 0) if experts is None else [one(l, e) for e in experts] for l in layers]
            names = np.array(grid, dtype=object)
        arrays[jax.tree_util.keystr(path)] = _Array(names, leaf.shape, leaf.dtype)
    return arrays


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist; the checkpoint is incomplete: fetch it again")
    return path


def _open(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """The open file that holds each tensor."""
    if (folder / _INDEX).is_file():
        weight_map = json.loads((folder / _INDEX).read_text())["weight_map"]
        listed = sorted(set(weight_map.values()))
    else:
        weight_map, listed = {}, [_SINGLE]
    opened = {name: stack.enter_context(safe_open(_existing(folder / name), framework="numpy")) for name in listed}
    files = {tensor: file for file in opened.values() for tensor in file.keys()}  # noqa: SIM118
    absent = set(weight_map) - set(files)
    if absent:
        raise ValueError(f"{_INDEX} lists tensors that its files lack: {_some(absent)}; fetch the checkpoint again")
    return files


def _check(files: dict[str, Any], arrays: list[_Array], tied: bool) -> None:
    """Names, shapes and types of all tensors against the model, before any is read."""
    expected = {name: array.stored for array in arrays for name in array.names.flat}
    missing, extra = set(expected) - set(files), set(files) - set(expected)
    if tied and _HEAD in extra and not missing:  # some tied checkpoints hold the head as well
        embedding = _ENDS["embedding",]
        if not np.array_equal(files[_HEAD].get_tensor(_HEAD), files[embedding].get_tensor(embedding)):
            raise ValueError(f"tie_word_embeddings=True but {_HEAD} is not {embedding}; set it to False in config.json")
        extra.remove(_HEAD)
    if missing or extra:
        raise ValueError(
            f"the checkpoint is not that of its config.json: missing {_some(missing)}; left over {_some(extra)}"
        )
    for name, shape in expected.items():
        tensor = files[name].get_slice(name)
        if tuple(tensor.get_shape()) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.get_shape())}, config.json asks for {shape}")
        if tensor.get_dtype() not in ("F32", "BF16", "F16"):
            raise ValueError(f"{name} has type {tensor.get_dtype()}; only F32, BF16 and F16 tensors load")


def _shards(arrays: dict[str, _Array], limit: int) -> Iterator[list[tuple[str, _Array, tuple[int, ...]]]]:
    shard, size = [], 0
    for key, array in arrays.items():
        for place in np.ndindex(array.names.shape):
            tensor = math.prod(array.own) * array.dtype.itemsize
            if shard and size + tensor > limit:
                yield shard
                shard, size = [], 0
            shard.append((key, array, place))
            size += tensor
    yield shard


def _tensor(leaf: jax.Array, array: _Array, place: tuple[int, ...]) -> np.ndarray:
    tensor = np.asarray(leaf[place])
    return np.ascontiguousarray(tensor.T if array.transposed else tensor)


def _of(i: int, n: int) -> str:
    return f"model-{i:05d}-of-{n:05d}.safetensors"


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _some(names: set[str]) -> str:
    """A few of them, sorted."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(itertools.islice(sorted(names), 3)) + more if names else "none"
