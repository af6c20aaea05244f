"""Experts whose tensors hold several of our matrices column by column, in bfloat16 or in MXFP4 (gpt-oss).

NAME[e,i:n] is the part of expert e in the tensor NAME [experts, in, outputs], or in its bias [experts, outputs], whose
outputs are the columns i, i + n, i + 2 n, ...; as a tensor of its own it has outputs first, as others have.

MXFP4 (OCP Microscaling Formats 1.0, 2023, section 5.3) keeps NAME_blocks [experts, outputs, in/32, 16] with two numbers
of 4 bits a byte, the first in the low ones, and NAME_scales [experts, outputs, in/32], exponents of 2 with bias 127.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.checkpoints.safetensors_files import FileTensor

_NAME = re.compile(r"(.*)\[(\d+),(\d+):(\d+)\]$")
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # sign, 2 bits, 1 bit


@dataclasses.dataclass(frozen=True)
class _Columns:
    """A part of one expert's matrix [in, outputs] or bias [outputs]."""

    whole: FileTensor
    first: int
    step: int

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, columns = self.whole.shape
        return (columns // self.step, *rows)

    def rows(self, start: int, stop: int) -> np.ndarray:
        return _read(self.whole)[..., self.first :: self.step][..., start:stop].T


@dataclasses.dataclass(frozen=True)
class _MXFP4Rows:
    """A part of one expert's blocks [outputs, in/32, 16] and scales [outputs, in/32]."""

    blocks: FileTensor
    scales: FileTensor
    first: int
    step: int

    @property
    def shape(self) -> tuple[int, ...]:
        outputs, groups, _ = self.blocks.shape
        return outputs // self.step, groups * 32

    def rows(self, start: int, stop: int) -> np.ndarray:
        ends = start * self.step, stop * self.step
        blocks, scales = (one.rows(*ends)[self.first :: self.step] for one in (self.blocks, self.scales))
        return dequantised(blocks, scales)


def dequantised(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers [n, in] of blocks [n, in/32, 16] and scales [n, in/32]; each is one that bfloat16 has."""
    pairs = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1).reshape(*scales.shape, 32)
    numbers = np.ldexp(pairs, scales.astype(np.int32)[..., None] - 127)
    return numbers.reshape(len(blocks), -1).astype(jnp.bfloat16)


@functools.lru_cache(maxsize=8)  # a matrix is read in strips of its outputs, and every strip needs all of it
def _read(tensor: FileTensor) -> np.ndarray:
    return tensor.rows(0, tensor.shape[0])


def with_columns(tensors: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the tensors of a file with the parts that `names` ask for in place of those that hold them.

    A tensor that cannot be cut so stays whole, and is then left over.
    """
    _read.cache_clear()  # of another file
    found = dict(tensors)
    for name in names:
        if not (match := _NAME.match(name)):
            continue
        whole, (expert, first, step) = match[1], map(int, match.groups()[1:])
        packed = [f"{whole}_blocks", f"{whole}_scales"]
        held = packed if all(part in tensors for part in packed) else [whole]
        parts = [tensors.get(part) for part in held]
        if not all(isinstance(part, FileTensor) and expert < part.shape[0] for part in parts):
            continue
        for part in held:
            found.pop(part, None)
        kind: Any = _MXFP4Rows if held is packed else _Columns
        found[name] = kind(*(_of_expert(part, expert) for part in parts), first, step)
    return found


def _of_expert(tensor: Any, expert: int) -> FileTensor:
    own = tensor.shape[1:]
    size = math.prod(own) * tensor.dtype.itemsize
    return FileTensor(tensor.file, tensor.offset + expert * size, own, tensor.dtype)


def interleaved(names: Iterable[str], part: Callable[[str], np.ndarray]) -> np.ndarray:
    """The tensor of a file from its parts, each with outputs first."""
    places = {name: tuple(int(number) for number in _NAME.match(name).groups()[1:]) for name in names}  # pyright: ignore
    experts = 1 + max(expert for expert, *_ in places.values())
    ordered = sorted(places, key=places.__getitem__)
    step = len(ordered) // experts
    stacked = [np.stack([part(name) for name in ordered[e * step : (e + 1) * step]], axis=1) for e in range(experts)]
    outputs_first = [one.reshape(-1, *one.shape[2:]) for one in stacked]
    return np.stack([one.T for one in outputs_first])
