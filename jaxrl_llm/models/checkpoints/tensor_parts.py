"""Tensors that hold the matrices of all experts of a layer, as parts with names of their own.

NAME[e,i/n] is the i-th of n equal parts of the rows of expert e in the tensor NAME [experts, n rows, columns], and
NAME[i/n] that of NAME [n rows, columns]. NAME[0] is the only row of the tensor NAME [1, columns]. NAME[e,i:n] is
described in `interleaved_experts`. NAME[i-j@n] is the rows i to j of every n rows.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jaxrl_llm.models.checkpoints.interleaved_experts import interleaved, with_columns
from jaxrl_llm.models.checkpoints.safetensors_files import FileTensor
from jaxrl_llm.models.checkpoints.tensor_names import StoredTensor


@dataclasses.dataclass(frozen=True)
class _RowsOfBlocks:
    """The rows `first` to `last` of every `size` rows."""

    whole: FileTensor
    first: int
    last: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *own = self.whole.shape
        return (rows // self.size * (self.last - self.first), *own)

    def rows(self, start: int, stop: int) -> np.ndarray:
        each = self.last - self.first
        block, end = start // each, -(-stop // each)
        found = self.whole.rows(block * self.size, end * self.size).reshape(end - block, self.size, *self.shape[1:])
        found = found[:, self.first : self.last].reshape(-1, *self.shape[1:])
        return found[start - block * each : stop - block * each]


def whole_name(name: str) -> str:
    """The tensor of a file that has this name or this part."""
    return name.partition("[")[0]


def with_parts(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a file with the parts that `names` ask for in place of those that hold them.

    A tensor that cannot be cut so stays whole, and is then left over.
    """
    names = list(names)
    found = with_columns(tensors, names)
    for name in (name for name in names if name.endswith("[0]")):
        tensor = found.get(whole_name(name))
        if isinstance(tensor, FileTensor) and tensor.shape[0] == 1:
            del found[whole_name(name)]
            found[name] = dataclasses.replace(tensor, shape=tensor.shape[1:])
    for name in (name for name in names if "@" in name):
        first, last, size = _block(name)
        if isinstance(tensor := tensors.get(whole_name(name)), FileTensor) and tensor.shape[0] % size == 0:
            found.pop(whole_name(name), None)
            found[name] = _RowsOfBlocks(tensor, first, last, size)
    cuts = {whole_name(name): int(match[1]) for name in names if (match := re.search(r"/(\d+)\]$", name))}
    for name, parts in cuts.items():
        tensor = found.get(name)
        if not isinstance(tensor, FileTensor) or len(tensor.shape) not in (2, 3) or tensor.shape[-2] % parts:
            continue
        del found[name]
        *experts, rows, columns = tensor.shape
        size = rows // parts * columns * tensor.dtype.itemsize
        for place, (*expert, part) in enumerate(itertools.product(*map(range, experts), range(parts))):
            at, of = tensor.offset + place * size, "".join(f"{one}," for one in expert)
            found[f"{name}[{of}{part}/{parts}]"] = FileTensor(tensor.file, at, (rows // parts, columns), tensor.dtype)
    return found


def joined(names: Iterable[str], part: Callable[[str], np.ndarray]) -> np.ndarray:
    """The tensor of a file, of its own name or of the names of all its parts; `part` gives each."""
    names = list(names)
    if "[" not in names[0]:
        return part(names[0])
    if names[0].endswith("[0]"):
        return part(names[0])[None]
    if ":" in names[0]:
        return interleaved(names, part)
    if "@" in names[0]:
        ordered = [(part(name), *_block(name)) for name in sorted(names, key=_block)]
        blocks = [rows.reshape(-1, last - first, *rows.shape[1:]) for rows, first, last, _ in ordered]
        return np.concatenate(blocks, axis=1).reshape(-1, *ordered[0][0].shape[1:])
    numbers = {name: tuple(map(int, re.findall(r"\d+", name.partition("[")[2]))) for name in names}
    ordered = [part(name) for name in sorted(names, key=numbers.__getitem__)]
    *expert, _, parts = numbers[names[0]]
    lead = [-1] * len(expert)
    return np.concatenate(ordered).reshape(*lead, parts * ordered[0].shape[0], *ordered[0].shape[1:])


def _block(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name.partition("[")[2])]
