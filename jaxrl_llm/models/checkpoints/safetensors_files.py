"""The tensors of safetensors files, read strip by strip so that a file is never mapped or held as a whole."""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground.json_files import decoded, json_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16, "U8": jnp.uint8}


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor at `offset` of an open file."""

    file: int
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def rows(self, start: int, stop: int) -> np.ndarray:
        row = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        size, offset = row * (stop - start), self.offset + row * start
        pieces = []
        while size:  # one read gives 2 GiB at most
            piece = os.pread(self.file, size, offset)
            if not piece:
                raise ValueError("the file ends inside a tensor; the checkpoint is incomplete: fetch it again")
            pieces.append(piece)
            size, offset = size - len(piece), offset + len(piece)
        return np.frombuffer(b"".join(pieces), self.dtype).reshape(stop - start, *self.shape[1:])


def weight_files(folder: Path) -> tuple[list[Path], set[str]]:
    """The files that hold a folder's tensors, and the tensors that its index lists (none without an index)."""
    if not (folder / INDEX).is_file():
        return [existing(folder / SINGLE)], set()
    listed = json_object(folder / INDEX, "fetch the checkpoint again").get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(_plain_name(name) for name in listed.values()):
        raise ValueError(
            f"{folder / INDEX}: weight_map must name a file of the folder for every tensor: fetch the checkpoint again"
        )
    return [existing(folder / name) for name in sorted(set(listed.values()))], set(listed)


def open_folder(folder: Path, stack: contextlib.ExitStack) -> dict[str, FileTensor]:
    """Every tensor of a folder; the files stay open as long as `stack`."""
    tensors: dict[str, FileTensor] = {}
    files, listed = weight_files(folder)
    for path in files:
        file = stack.enter_context(path.open("rb")).fileno()
        data, header = read_header(path)
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise ValueError(f"{path}: {name} has type {entry['dtype']}; only F32, BF16, F16 and U8 tensors load")
            dtype, (begin, end) = np.dtype(_DTYPES[entry["dtype"]]), entry["data_offsets"]
            if end - begin != math.prod(entry["shape"]) * dtype.itemsize:
                raise ValueError(
                    f"{path}: {name} has {end - begin} bytes, not those of its shape {entry['shape']} and type "
                    f"{entry['dtype']}: fetch the checkpoint again"
                )
            tensors[name] = FileTensor(file, data + begin, tuple(entry["shape"]), dtype)
    if absent := listed - set(tensors):
        raise ValueError(
            f"{folder / INDEX} lists tensors that its files lack: {some(absent)}; fetch the checkpoint again"
        )
    return tensors


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a file begin, and name -> {dtype, shape, data_offsets}."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = decoded(file.read(length)) if 0 < length <= size - 8 else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ValueError(f"{str(path)!r} is not a safetensors file, or is cut off: fetch it again")
    header.pop("__metadata__", None)
    if wrong := [name for name, entry in header.items() if not _is_entry(entry)]:
        raise ValueError(
            f"{str(path)!r}: {some(wrong)} lack dtype, shape or data_offsets (begin, end) in the header: fetch it again"
        )
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size:
        raise ValueError(f"{str(path)!r} has {size} bytes and its header asks for {8 + length + end}: fetch it again")
    placed = sorted((*entry["data_offsets"], name) for name, entry in header.items())
    for (_, stop, name), (start, _, other) in itertools.pairwise(placed):
        if start < stop:
            raise ValueError(f"{str(path)!r}: {name} and {other} share bytes {start} to {stop}: fetch it again")
    return 8 + length, header


def _is_entry(entry: Any) -> bool:
    """Return whether this is {"dtype", "shape", "data_offsets"} of a tensor, its offsets in order."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    return all(type(n) is int and n >= 0 for n in (*shape, *offsets)) and offsets[0] <= offsets[1]


def _plain_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


def existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist; the checkpoint is incomplete: fetch it again")
    return path


def some(names: Iterable[str]) -> str:
    """The first few names, sorted, for a message."""
    first, rest = sorted(names)[:3], len(set(names)) - 3
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "") if first else "none"
