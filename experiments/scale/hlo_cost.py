"""FLOPs, bytes and collectives of a compiled program, with every loop body counted as often as it runs.

FLOPs are those of matrix products (flops.py), as in the peaks of chips. Bytes are what a fused instruction reads from
and writes to the main memory; of a slice, and of what a scatter writes into an array, only these places count, since
XLA updates an array in place or copies it by an instruction of its own. A collective's bytes are what one device sends
in the bandwidth-optimal algorithm over n devices, with `in` the operand's bytes:

all-gather (n - 1) in    reduce-scatter in (n - 1) / n    all-reduce 2 in (n - 1) / n    all-to-all in (n - 1) / n

A permutation sends its operand. A ragged all-to-all moves those rows of its first operand that an even load uses,
into its second, which is its result.
Between slices of TPUs XLA spells a collective as a transfer by the hosts of what the chips of a slice have made of it.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

from experiments.scale.hlo import (
    Computation,
    Groups,
    Instruction,
    Module,
    Shape,
    between_slices,
    device_groups,
    links_used,
    trip_count,
)
from experiments.scale.hlo_flops import flops_of, grouped

Key = TypeVar("Key")

_COLLECTIVES = {
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
}  # fmt: skip
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "add-dependency", "get-dimension-size", "iota", "rng-get-and-update-state",
}  # fmt: skip
# XLA:TPU lets a collective go on beside other work, in fusions that each name it; the one that starts it counts.
_STEP = "async_collective_fusion"
_LAYERS = re.compile(r"one_of_(\d+)_layers/")  # a kernel of grouped_matmul.py that is given a stack and reads a layer
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that is written into the first


@dataclasses.dataclass(frozen=True)
class Cost:
    """On one device. exchanges: {(kind, groups of devices, links): (how many, bytes sent)}, links as `links_used` has
    them. unknown: kernels whose FLOPs nothing states."""

    flops: float = 0.0
    bytes: float = 0.0
    exchanges: dict[tuple[str, Groups, int], tuple[float, float]] = dataclasses.field(default_factory=dict)
    unknown: frozenset[str] = frozenset()

    def __add__(self, other: "Cost") -> "Cost":
        merged = _merged([*self.exchanges.items(), *other.exchanges.items()])
        return Cost(self.flops + other.flops, self.bytes + other.bytes, merged, self.unknown | other.unknown)

    def __mul__(self, times: int | float) -> "Cost":
        every = {key: (count * times, size * times) for key, (count, size) in self.exchanges.items()}
        return Cost(self.flops * times, self.bytes * times, every, self.unknown)

    @property
    def collectives(self) -> dict[str, tuple[float, float]]:
        """{kind: (how many, bytes sent)}."""
        return _merged((kind, value) for (kind, *_), value in self.exchanges.items())

    @property
    def sent(self) -> float:
        return float(sum(size for _, size in self.exchanges.values()))


def _merged(values: Iterable[tuple[Key, tuple[float, float]]]) -> dict[Key, tuple[float, float]]:
    sums: dict[Key, tuple[float, float]] = {}
    for key, (count, size) in values:
        before = sums.get(key, (0.0, 0.0))
        sums[key] = (before[0] + count, before[1] + size)
    return sums


def measure(module: Module, devices: int, filled: float = 1.0) -> tuple[Cost, Cost]:
    """(everything outside loops of a run-time bound, one turn of the outermost such loops), for one device.

    Micro-batches and decode steps are such loops. A loop inside one of them (the refilling of slots) is not counted.
    `filled` is the share of the rows of a grouped matmul or a ragged all-to-all that hold a (token, expert) pair; the
    others are skipped.
    """
    return _Reader(module, devices, filled).total(module.entry)


class _Reader:
    """Every pair of costs is as `measure` returns it."""

    def __init__(self, module: Module, devices: int, filled: float):
        self.module, self.devices, self.filled = module, devices, filled
        self.known: dict[str, tuple[Cost, Cost]] = {}

    def total(self, computation: Computation) -> tuple[Cost, Cost]:
        if computation.name not in self.known:
            self.known[computation.name] = _summed(self._one(computation, i) for i in computation.instructions)
        return self.known[computation.name]

    def _one(self, inside: Computation, i: Instruction) -> tuple[Cost, Cost]:
        if i.opcode not in ("while", "conditional", "call", "call-start", "async-start"):
            return self._own(inside, i), Cost()
        called = [self.total(self.module.computations[name]) for name in i.called]
        if i.opcode == "while":
            once, turn = called[0]
            trips = trip_count(self.module, inside, i)
            return (Cost(), once) if trips is None else (once * trips, turn * trips)
        if i.opcode == "conditional":
            once, turn = (max(costs, key=lambda c: (c.flops, c.bytes, c.sent)) for costs in zip(*called, strict=True))
            return once, turn
        return _summed(called)

    def _own(self, inside: Computation, i: Instruction) -> Cost:
        if i.opcode in _FREE or i.opcode.endswith(("-done", "-update")) or "async-collective-done" in i.name:
            return Cost()
        read = [shape for name in _sources(i) for shape in inside.by_name[name].shapes]
        moved = _in_memory(read) + _in_memory(i.shapes)
        kind = between_slices(i) or i.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            # What starts one names its operands beside its results.
            names_both = i.opcode.endswith("-start") and len(i.shapes) > len(read)
            moved = _in_memory(i.shapes) if names_both else moved
            return self._collective(inside, i, kind) + Cost(bytes=moved * self._used(kind))
        if i.opcode == "fusion":
            body = self.module.computations[i.called[0]]
            edge = zip(body.parameters, i.operands, strict=True)
            moved = sum(self._read(body, parameter, inside.by_name[name]) for parameter, name in edge)
            return self._fused(i, body) + Cost(bytes=moved + _written(body, i))
        if i.opcode in ("dynamic-slice", "gather", "slice"):
            moved = _in_memory(i.shapes[:1]) + (_size(i.shapes[:1]) if _in_memory(read[:1]) else 0.0)
        elif i.opcode == "slice-start":  # its shapes are operand, result and context; the slice alone is read
            moved = _in_memory(i.shapes[1:2]) + (0.0 if i.shapes[0].fast else i.shapes[1].bytes)
        elif i.opcode in _IN_PLACE:
            moved = 2 * _in_memory(inside.by_name[i.operands[_IN_PLACE[i.opcode]]].shapes)
        elif i.opcode == "copy-start":
            moved = _in_memory(i.shapes[:2])
        elif i.opcode == "custom-call" and (layers := _LAYERS.search(i.attributes)):
            moved -= (1 - 1 / int(layers[1])) * max(_in_memory([shape]) for shape in read)
        flops = flops_of(inside, i)
        if flops is None:
            return Cost(bytes=moved, unknown=frozenset({i.name}))
        return Cost(flops * self.filled if grouped(i) else flops, moved)

    def _used(self, kind: str) -> float:
        """The share of a collective's rows that travel."""
        return self.filled if kind == "ragged-all-to-all" else 1.0

    def _read(self, body: Computation, parameter: Instruction, given: Instruction) -> float:
        """Bytes that a fusion reads of one operand, perhaps by fusions inside it."""
        whole = _in_memory(given.shapes)
        pending, parts = [parameter], 0.0
        while pending:
            at = pending.pop()
            for user in body.users[at.name]:
                if _STEP in body.name and (user is body.root or user.opcode in _COLLECTIVES):
                    continue  # handed on
                if user.opcode in ("bitcast", "reshape") or (user.opcode == "convert" and user is not body.root):
                    pending.append(user)
                elif user.opcode == "fusion":
                    inner = self.module.computations[user.called[0]]
                    places = [inner.parameters[n] for n, name in enumerate(user.operands) if name == at.name]
                    parts += sum(self._read(inner, place, given) for place in places)
                    if _behind(inner, inner.root) in places:  # it gives the operand another shape and reads nothing
                        pending.append(user)
                elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == at.name:
                    # Of what is given, whatever it is converted to; also if it is kept in the fast memory.
                    parts += Shape(given.shapes[0].dtype, user.shapes[0].dims).bytes
                elif not _updated_in_place(user, at) or at.shapes[0].dtype != given.shapes[0].dtype:
                    return whole
        return min(whole, parts)

    def _fused(self, fusion: Instruction, body: Computation) -> Cost:
        """Cost of a fusion: it computes and sends what is inside, and moves only what crosses its edge."""
        cost, later = Cost(), _STEP in body.name
        for i in body.instructions:
            cost += Cost(flops_of(body, i) or 0.0)
            if i.opcode == "fusion":
                cost += self._fused(i, self.module.computations[i.called[0]])
            kind = i.opcode.removesuffix("-start")
            if kind in _COLLECTIVES and not later:
                # XLA:TPU fuses an all-reduce with the slice that a device keeps of it.
                scattered = "all-reduce-scatter" in body.name + fusion.name
                cost += self._collective(body, i, "reduce-scatter" if scattered else kind)
        return cost

    def _collective(self, inside: Computation, i: Instruction, kind: str) -> Cost:
        size = self._used(kind) * sum(shape.bytes for name in _sources(i) for shape in inside.by_name[name].shapes)
        groups = device_groups(i, self.devices)
        n = len(groups[0]) if groups else 1
        if kind == "collective-permute":
            sent = size if groups else 0
        elif kind in ("all-gather", "collective-broadcast"):
            sent = size * (n - 1)
        else:
            sent = (2 if kind == "all-reduce" else 1) * size * (n - 1) / n
        return Cost(exchanges={(kind, groups, links_used(i)): (1.0, float(sent))})


def _summed(costs: Iterable[tuple[Cost, Cost]]) -> tuple[Cost, Cost]:
    once, turn = (sum(column, Cost()) for column in zip(*costs, strict=True))
    return once, turn


def _sources(i: Instruction) -> Sequence[str]:
    """The operands that are read: of a ragged all-to-all not where it writes, nor its numbers of rows."""
    return i.operands[:1] if i.opcode.startswith("ragged-all-to-all") else i.operands


def _size(shapes: Iterable[Shape]) -> float:
    return float(sum(s.bytes for s in shapes))


def _in_memory(shapes: Iterable[Shape]) -> float:
    return _size(s for s in shapes if not s.fast)


def _updated_in_place(i: Instruction, array: Instruction) -> bool:
    return i.opcode in _IN_PLACE and i.operands[0] == array.name


def _written(body: Computation, i: Instruction) -> float:
    """Bytes that a fusion writes; an update in place writes the update."""
    roots = [body.by_name[name] for name in body.root.operands] if body.root.opcode == "tuple" else [body.root]
    written = 0.0
    for part, shape in zip(roots, i.shapes, strict=False):
        part = _behind(body, part)
        if _STEP in body.name and (part.opcode == "parameter" or part.opcode in _COLLECTIVES):
            continue
        into = _behind(body, body.by_name[part.operands[0]]) if part.operands else part
        # Into an array that the fusion makes itself, or of another type.
        made = part.opcode == "scatter" and into.opcode != "parameter"
        whole = made or into.shapes[0].dtype != shape.dtype
        if part.opcode in _IN_PLACE and not whole and not shape.fast:
            written += body.by_name[part.operands[_IN_PLACE[part.opcode]]].shapes[0].bytes
        else:
            written += _in_memory([shape])
    return written


def _behind(body: Computation, part: Instruction) -> Instruction:
    """Return the instruction that is written, whatever its shape and type."""
    while part.opcode in ("bitcast", "reshape", "convert", "copy"):
        part = body.by_name[part.operands[0]]
    return part
