"""Compiled HLO, read from its text into instructions: shapes, operands, and the computations that they call.

`cost_analysis` counts the body of a loop once and knows nothing of GPUs, and jaxlib's `HloModule` tells neither shapes
nor attributes; the text of the optimised module has all of it, on every platform. Format:
openxla.org/xla/operation_semantics and what `compiled.as_text()` prints.
"""

import collections
import dataclasses
import functools
import math
import re

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \([^\n]*\) -> [^\n]*\{\n(.*?)\n\}(?:,|$)", re.M | re.S)
_NEXT = re.compile(r"\n(?= +(?:ROOT )?%?[\w.\-]+ = )")  # other line breaks are inside an attribute
_INSTRUCTION = re.compile(r" +(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(.*)", re.S)
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_LIST = re.compile(r"(?:replica_groups|source_target_pairs|_xla_megascale_target)=\{((?:\{[\d,>-]*\},?)+)\}")
_MESH = re.compile(r"replica_groups=\w+\[([^\]]*)\](?:, device_ids=\(([^{]*)\))?\s*\{([^}]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|(?:true|false|branch)_computations?)=(%[\w.\-]+|\{[^}]*\})")

SLICE = 100_000  # libtpu numbers the devices of several slices SLICE x (slice + 1) + place
Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Shape:
    dtype: str
    dims: tuple[int, ...]
    fast: bool = False  # in on-chip memory (space 1), so that moving it takes no bandwidth of the main memory

    @property
    def bytes(self) -> int:
        digits = re.search(r"\d+", self.dtype)  # a token has none and takes no memory
        bits = 8 if self.dtype == "pred" else int(digits[0]) if digits else 0
        return -(-math.prod(self.dims) * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of the result, or of each part of a tuple
    operands: tuple[str, ...]
    attributes: str  # what follows the operands, as printed
    literal: str  # between the brackets: a constant's value, a parameter's number

    def attribute(self, key: str) -> str:
        """The value of `key=...`, without its braces; empty if it is not there."""
        match = re.search(rf"\b{key}=(?:\{{([^}}]*)\}}|([^,\s]+))", self.attributes)
        return next((value for value in match.groups() if value is not None), "") if match else ""

    @property
    def called(self) -> list[str]:
        """The computations that run with it, without the condition of a loop."""
        return _NAME.findall(" ".join(_CALLED.findall(self.attributes)))


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        return sorted((i for i in self.instructions if i.opcode == "parameter"), key=lambda i: int(i.literal))

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        users = collections.defaultdict(list)
        for i in self.instructions:
            for operand in i.operands:
                users[operand].append(i)
        return users


@dataclasses.dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: Computation


def parse(text: str) -> Module:
    computations, entry = {}, ""
    for is_entry, name, body in _COMPUTATION.findall(text):
        lines = [_INSTRUCTION.match(line) for line in _NEXT.split(body)]
        instructions = {line[2]: _instruction(*line.group(2, 3, 4, 5, 6)) for line in lines if line}
        (root,) = (instructions[line[2]] for line in lines if line and line[1])
        computations[name] = Computation(name, tuple(instructions.values()), root)
        entry = name if is_entry else entry
    if not entry:
        raise ValueError("this text holds no ENTRY computation; give the text of a compiled program")
    return Module(computations, computations[entry])


def _instruction(name: str, result: str, opcode: str, inside: str, attributes: str) -> Instruction:
    shapes = tuple(
        Shape(dtype, tuple(map(int, re.findall(r"\d+", dims))), "S(1)" in layout)
        for dtype, dims, layout in _SHAPE.findall(result)
    )
    return Instruction(name, opcode, shapes, tuple(_NAME.findall(inside)), attributes, inside)


def links_used(i: Instruction) -> int:
    """How many links of a torus libtpu's algorithm for a collective uses at once; 0 where the program does not say.

    On the SparseCores every "color" is a part of the data that goes its own way round the torus, in one direction; on
    the TensorCore one of a "Strategy" goes both ways, and "1D" is a ring.
    """
    if ways := i.attributes.count('"phase_rings"'):
        return ways
    if found := re.search(r"Strategy\w+\{colors:(\d)", i.attributes):
        return 2 * int(found[1])
    return 2 if '"emitter":"1D' in i.attributes else 0


def device_groups(i: Instruction, devices: int) -> Groups:
    """Which devices exchange with one another, by their place in the program; of a permutation, the pairs (from, to).

    Where hosts transfer between slices, they are numbered as SLICE says.
    """
    text = i.attributes
    if named := _MESH.search(text):  # mesh['a'=4,'b'=2] {'a'}, and mesh['a'=4,'b'=2], device_ids=(...) {'a'}
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        axes = [list(sizes).index(axis) for axis in re.findall(r"'(\w+)'", named[3])]
        grid = _listed(named[2] or f"[{math.prod(sizes.values())}]").reshape(list(sizes.values()))
        grid = np.moveaxis(grid, axes, range(-len(axes), 0)).reshape(-1, math.prod(grid.shape[axis] for axis in axes))
    elif iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\S+)", text):
        grid = _listed(iota[3]).reshape(int(iota[1]), int(iota[2]))
    elif slices := re.search(
        r'_xla_megascale_target="(.*?)x\{0:(\d+)\}"', text
    ):  # {1,2}x{0:15}: each place with itself
        sets = [list(map(int, re.findall(r"\d+", one))) for one in re.findall(r"\{[\d,]+\}", slices[1])]
        grid = [[SLICE * s + place for s in one] for one in sets for place in range(int(slices[2]) + 1)]
    elif listed := _LIST.search(text):
        grid = [list(map(int, re.findall(r"\d+", one))) for one in re.findall(r"\{[^{}]+\}", listed[1])]
    else:
        grid = [range(devices)]
    groups = tuple(tuple(map(int, row)) for row in grid)
    permuted = "source_target_pairs" in text or '"ONE_TO_ONE"' in text
    return tuple(g for g in groups if g[0] != g[1]) if permuted else groups


def _listed(ids: str) -> np.ndarray:
    """The numbers of "0,2,1,3" or of "[2,2]T(1,0)"."""
    if iota := _IOTA.match(ids):
        dims, order = (tuple(map(int, part.split(","))) if part else None for part in iota.groups())
        return np.arange(math.prod(dims or ())).reshape(dims or ()).transpose(order).ravel()
    return np.array(list(map(int, ids.split(","))))


def between_slices(i: Instruction) -> str:
    """The collective that a transfer by hosts carries out between slices of TPUs; empty: it is no such transfer."""
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.attributes) if i.opcode == "send" else None
    return {"ONE_TO_ONE": "collective-permute"}.get(kind[1], kind[1].lower().replace("_", "-")) if kind else ""


def trip_count(module: Module, inside: Computation, loop: Instruction) -> int | None:
    """How often a `while` runs; None if its bound is known only at run time.

    The compiler notes the number, or the condition is `i < n` (or `n > i`) with a constant n and start. A loop in the
    named scope `usually_once` counts as one turn.
    """
    if known := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.attributes):
        return int(known[1])
    if 'usually_once/while"' in loop.attributes:  # the rounds of expert_parallel.py
        return 1
    condition = module.computations[loop.attribute("condition").lstrip("%")]
    test = condition.root
    less = {"LT": (0, 1), "GT": (1, 0)}.get(test.attribute("direction"))
    if test.opcode != "compare" or less is None:
        return None
    start, stop = (_at_start(inside, loop, condition.by_name[test.operands[side]]) for side in less)
    return None if start is None or stop is None else max(0, stop - start)


def _at_start(inside: Computation, loop: Instruction, i: Instruction) -> int | None:
    """The value of a constant, or of a part of the carried tuple when the loop starts; None: no constant."""
    if i.opcode == "get-tuple-element":
        start = inside.by_name[loop.operands[0]]
        if start.opcode != "tuple":
            return None
        i = inside.by_name[start.operands[int(i.attribute("index"))]]
        while i.opcode in ("copy", "bitcast", "convert"):
            i = inside.by_name[i.operands[0]]
    return int(i.literal) if i.opcode == "constant" and i.literal.lstrip("-").isdigit() else None
