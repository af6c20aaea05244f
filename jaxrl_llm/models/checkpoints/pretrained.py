"""Published checkpoints (safetensors folders, GGUF files) <-> the parameters of `Model`.

Each device's part of an array is read on its own, in strips of a few rows, so that no process ever holds more of the
checkpoint on the host than that part.
"""

import concurrent.futures
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxrl_llm.ground.array_typing import Params
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.checkpoints.model_fields import published_config
from jaxrl_llm.models.checkpoints.pretrained_config import to_published
from jaxrl_llm.models.checkpoints.published import Published, open_checkpoint
from jaxrl_llm.models.checkpoints.safetensors_files import INDEX, SINGLE, some
from jaxrl_llm.models.checkpoints.tensor_names import EMBEDDING, HEAD, Stacked, StoredTensor, stacked_arrays
from jaxrl_llm.models.checkpoints.tensor_parts import joined, whole_name, with_parts
from jaxrl_llm.models.transformer import Model

_READERS = 4  # threads; they mostly copy memory, with the interpreter's lock released


def load_pretrained(
    path: str | os.PathLike[str], *, dtype: str | None = None, mesh: jax.sharding.Mesh | None = None
) -> tuple[Model, dict[str, Any]]:
    """The model and the parameters of a published checkpoint: a folder or a GGUF file (docs/models.md).

    dtype: float32 or bfloat16, of parameters and computation; default: that of the file.

    Raises:
      FileNotFoundError: no such folder, or a file of it is missing.
      ValueError: an architecture that this model does not compute; tensors missing, left over or of another shape.
    """
    model = Model(published_config(path, dtype), mesh)
    with open_checkpoint(path) as (published, tensors):
        return model, _load(published, tensors, model)


def load_params(path: str | os.PathLike[str], model: Model) -> dict[str, Any]:
    """The parameters of a published checkpoint on `model.mesh`, in `model.config.param_dtype`. Raises as
    `load_pretrained`, and ValueError if the checkpoint is of another architecture."""
    with open_checkpoint(path) as (published, tensors):
        return _load(published, tensors, model)


def save_pretrained(
    params: Params,
    config: ModelConfig,
    path: str | os.PathLike[str],
    *,
    published: Published | None = None,
    shard_bytes: int = 4 * 2**30,
) -> None:
    """Write parameters so that `load_pretrained`, or Hugging Face's classes of the family, read them back.

    Args:
      params: of `Model(config)`, stacked; every array addressable by this process.
      published: of the original, whose other files and fields of config.json are kept.
      shard_bytes: largest size of a file, exceeded only by a single larger tensor.

    Raises:
      FileExistsError: the folder holds a checkpoint already.
      ValueError: params are not those of `config`, or no published family computes it.
    """
    folder = Path(path)
    if any(folder.glob("*.safetensors")) or (folder / "config.json").exists():
        raise FileExistsError(f"path={str(path)!r} holds a checkpoint already; give an empty folder")
    written = to_published(config, None if published is None else published.config)
    arrays = stacked_arrays(Model(config), written["model_type"])
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    wrong = {key for key in arrays if key not in leaves or leaves[key].shape != arrays[key].shape}
    if wrong or len(leaves) != len(arrays):
        raise ValueError(f"params are not those of this config: {some(wrong or set(leaves) - set(arrays))} differ")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ({} if published is None else published.files).items():
        (folder / name).write_bytes(content)
    held = _held(arrays)
    shards = list(_shards(arrays, held, shard_bytes))
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for file, shard in zip(names, shards, strict=True):
        tensors = {name: _tensor(leaves, arrays, held[name]) for name in shard}
        (folder / file).touch()
        mode = (folder / file).stat().st_mode  # that of the umask, which safetensors does not ask
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(mode)
    if count > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        size = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    _write_json(folder / "config.json", written)  # last, because a folder without it does not load


def _load(published: Mapping[str, Any], tensors: Mapping[str, StoredTensor], model: Model) -> dict[str, Any]:
    arrays, shapes = stacked_arrays(model, published.get("model_type", "")), model.shapes()
    tensors = with_parts(tensors, (name for array in arrays.values() for name in array.names.flat))
    for layer in range(published.get("num_nextn_predict_layers") or 0):  # they predict further tokens
        prefix = f"model.layers.{model.config.num_hidden_layers + layer}."
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    _check_tensors(tensors, list(arrays.values()), model.config.tie_word_embeddings)
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        loaded = [
            _on_devices(array, tensors, leaf.sharding, pool)
            for array, leaf in zip(arrays.values(), jax.tree.leaves(shapes), strict=True)
        ]
    return jax.tree.unflatten(jax.tree.structure(shapes), loaded)


def _on_devices(array: Stacked, tensors: Mapping[str, StoredTensor], sharding: Any, pool: Any) -> jax.Array:
    """The array on its devices: each part is read once and handed over before the next is read."""
    devices: dict[Any, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        devices.setdefault(tuple(s.indices(n) for s, n in zip(index, array.shape, strict=True)), []).append(device)
    parts = []
    for bounds, same in devices.items():
        part = array.read(tensors, tuple(slice(*b) for b in bounds), pool)
        parts += [jax.device_put(part, device) for device in same]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def _check_tensors(tensors: Mapping[str, StoredTensor], arrays: list[Stacked], tied: bool) -> None:
    """Refuses tensors whose names or shapes are not the model's, before any of them is read."""
    expected = {name: array.stored for array in arrays for name in array.names.flat}
    missing, extra = set(expected) - set(tensors), set(tensors) - set(expected)
    # Of rope_theta, in old exports; and of layers that predict further tokens.
    extra = {name for name in extra if not (name.endswith(".rotary_emb.inv_freq") or name.startswith("mtp."))}
    if tied and HEAD in extra and not missing:  # some tied checkpoints hold the head as well
        head, embedding = (tensors[name].rows(0, tensors[name].shape[0]) for name in (HEAD, EMBEDDING))
        if not np.array_equal(head, embedding):
            raise ValueError(f"tie_word_embeddings=True but {HEAD} is not {EMBEDDING}; set it to False in config.json")
        extra.remove(HEAD)
    if missing or extra:
        raise ValueError(
            f"the checkpoint is not that of its config.json: missing {some(missing)}; left over {some(extra)}"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{name} has shape {tensors[name].shape}, config.json asks for {shape}")


def _held(arrays: dict[str, Stacked]) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
    """Every tensor of a file: {its name: {name of a part: (array, place in it)}}; most have one part, themselves."""
    held: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for key, array in arrays.items():
        for place in np.ndindex(array.names.shape):
            name = str(array.names[place])
            held.setdefault(whole_name(name), {})[name] = key, place
    return held


def _shards(arrays: dict[str, Stacked], held: Mapping[str, Any], limit: int) -> Iterator[list[str]]:
    shard, size = [], 0
    for name, parts in held.items():
        own = (arrays[key] for key, _ in parts.values())
        tensor = sum(math.prod(array.own) * array.dtype.itemsize for array in own)
        if shard and size + tensor > limit:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += tensor
    yield shard


def _tensor(
    leaves: Mapping[str, jax.Array], arrays: dict[str, Stacked], parts: Mapping[str, tuple[str, tuple[int, ...]]]
) -> np.ndarray:
    def part(name: str) -> np.ndarray:
        key, place = parts[name]
        tensor = np.asarray(leaves[key][place])
        return tensor.T if arrays[key].transposed else tensor

    return np.ascontiguousarray(joined(parts, part))


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
