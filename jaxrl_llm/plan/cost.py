"""FLOPs, bytes and collectives of a compiled program, every loop body as often as it runs.

FLOPs are those of matrix products (dot, convolution, and kernels that state theirs), as in the peaks of chips.
Bytes are what a fused instruction reads from and writes to the main memory; of a slice only the slice counts. A
collective's bytes are what one device sends in the bandwidth-optimal algorithm over n devices:

all-gather (n - 1) in    reduce-scatter in (n - 1) / n    all-reduce 2 in (n - 1) / n    all-to-all in (n - 1) / n

with `in` the operand's bytes; a permutation sends its operand. A ragged all-to-all counts its whole operand.
"""

import dataclasses
import math
import re
from collections.abc import Iterable

from jaxrl_llm.plan.hlo import Computation, Instruction, Module, Shape, trip_count
from jaxrl_llm.plan.kernels import grouped, kernel_flops

__all__ = ["Cost", "measure"]

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "add-dependency", "get-dimension-size", "iota", "rng-get-and-update-state",
}  # fmt: skip
_THROUGH = ("bitcast", "reshape", "convert", "copy")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one device. collectives: {kind: (how many, bytes sent)}. unknown: kernels whose FLOPs nothing states."""

    flops: float = 0.0
    bytes: float = 0.0
    collectives: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    unknown: frozenset[str] = frozenset()

    def __add__(self, other: "Cost") -> "Cost":
        kinds = {**self.collectives}
        for kind, (count, size) in other.collectives.items():
            before = kinds.get(kind, (0.0, 0.0))
            kinds[kind] = (before[0] + count, before[1] + size)
        return Cost(self.flops + other.flops, self.bytes + other.bytes, kinds, self.unknown | other.unknown)

    def __mul__(self, times: int | float) -> "Cost":
        kinds = {kind: (count * times, size * times) for kind, (count, size) in self.collectives.items()}
        return Cost(self.flops * times, self.bytes * times, kinds, self.unknown)

    @property
    def sent(self) -> float:
        return float(sum(size for _, size in self.collectives.values()))


def measure(module: Module, devices: int, filled: float = 1.0) -> tuple[Cost, Cost]:
    """(everything outside loops of a run-time bound, one turn of the outermost such loops).

    Micro-batches and decode steps are such loops. A loop inside one of them (the refilling of slots) is not counted.

    Args:
      devices: of the program.
      filled: share of the rows of a grouped matmul that hold a pair; its kernel skips the others, and they count in its
        shapes.
    """
    reader = _Reader(module, devices, filled)
    return reader.total(module.entry, turn=False), reader.total(module.entry, turn=True)


class _Reader:
    def __init__(self, module: Module, devices: int, filled: float):
        self.module, self.devices, self.filled = module, devices, filled
        self.known: dict[tuple[str, bool], Cost] = {}

    def total(self, computation: Computation, turn: bool) -> Cost:
        """The cost of running a computation once, or of one turn of the loops of unknown length in it."""
        key = computation.name, turn
        if key not in self.known:
            self.known[key] = sum((self._one(computation, i, turn) for i in computation.instructions), Cost())
        return self.known[key]

    def _one(self, inside: Computation, i: Instruction, turn: bool) -> Cost:
        called = [self.module.computations[name] for name in i.called if name in self.module.computations]
        if i.opcode == "while":
            body, trips = self.total(called[0], turn), trip_count(self.module, inside, i)
            if trips is None:
                return self.total(called[0], turn=False) if turn else Cost()
            return body * trips
        if i.opcode == "conditional":
            return max((self.total(c, turn) for c in called), key=lambda c: (c.flops, c.bytes, c.sent))
        if i.opcode in ("call", "async-start"):
            return sum((self.total(c, turn) for c in called), Cost())
        if turn:
            return Cost()
        return self._own(inside, i, called)

    def _own(self, inside: Computation, i: Instruction, called: list[Computation]) -> Cost:
        kind = i.opcode.removesuffix("-start")
        if i.opcode in _FREE or i.opcode.endswith(("-done", "-update")):
            return Cost()
        read = [shape for name in i.operands for shape in inside.by_name[name].shapes]
        moved = _in_memory(read) + _in_memory(i.shapes)
        if kind in COLLECTIVES:
            return Cost(0.0, moved, {kind: (1.0, self._sent(kind, i, sum(s.bytes for s in read)))})
        if i.opcode == "fusion":
            return self._fused(inside, i, called[0])
        if i.opcode in ("dynamic-slice", "gather", "slice", "slice-start"):
            moved = 2 * _in_memory(i.shapes[:1])
        elif i.opcode == "dynamic-update-slice":
            moved = 2 * _in_memory(inside.by_name[i.operands[1]].shapes)
        elif i.opcode == "copy-start":
            moved = _in_memory(i.shapes[:2])
        flops = _flops(inside, i)
        share = self.filled if grouped(i) else 1.0
        return Cost(share * (flops or 0.0), moved, {}, frozenset({i.name} if flops is None else ()))

    def _fused(self, outside: Computation, i: Instruction, body: Computation) -> Cost:
        """A fusion computes what is inside and moves what crosses its edge."""
        inner = [(x, _flops(body, x)) for x in body.instructions]
        cost = Cost(sum(flops or 0.0 for _, flops in inner), 0.0)
        for x, _ in inner:
            if x.opcode == "fusion":
                deeper = self._fused(body, x, self.module.computations[x.called[0]])
                cost += dataclasses.replace(deeper, bytes=0.0)
            kind = x.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                # XLA:TPU fuses an all-reduce with the slice that a device keeps of it.
                kind = "reduce-scatter" if "all-reduce-scatter" in body.name + i.name else kind
                size = sum(s.bytes for name in x.operands for s in body.by_name[name].shapes)
                cost += Cost(collectives={kind: (1.0, self._sent(kind, x, size))})
        moved = sum(_read(body, p, outside.by_name[name]) for p, name in zip(body.parameters, i.operands, strict=True))
        return cost + Cost(bytes=moved + _written(body, i))

    def _sent(self, kind: str, i: Instruction, size: int) -> float:
        n = self._group(i)
        if kind == "collective-permute":
            pairs = re.findall(r"\{(\d+),(\d+)\}", i.attributes[i.attributes.find("source_target_pairs") :])
            return float(size) if any(a != b for a, b in pairs) else 0.0
        if kind in ("all-gather", "collective-broadcast"):
            return float(size * (n - 1))
        return (2 if kind == "all-reduce" else 1) * size * (n - 1) / n

    def _group(self, i: Instruction) -> int:
        """Devices that take part together."""
        if named := re.search(r"replica_groups=\w*\[([^\]]*)\]\s*\{([^}]*)\}", i.attributes):  # mesh['a'=4,'b'=2] {'a'}
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
            return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
        if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", i.attributes):
            return int(iota[2])
        if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", i.attributes):
            return len(listed[1].split(","))
        return self.devices


def _in_memory(shapes: Iterable[Shape]) -> float:
    return float(sum(s.bytes for s in shapes if not s.fast))


def _read(body: Computation, parameter: Instruction, given: Instruction) -> float:
    """Bytes that a fusion reads of one operand."""
    whole = _in_memory(given.shapes)
    pending, parts = [parameter], 0.0
    while pending:
        at = pending.pop()
        for user in body.users[at.name]:
            if user.opcode in ("bitcast", "reshape"):
                pending.append(user)
            elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == at.name:
                parts += _in_memory(user.shapes)
            elif not (user.opcode == "dynamic-update-slice" and user.operands[0] == at.name):  # written in place
                return whole
    return min(whole, parts)


def _written(body: Computation, i: Instruction) -> float:
    """Bytes that a fusion writes; an update in place writes the update."""
    root = body.by_name[body.root]
    roots = [body.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    written = 0.0
    for part, shape in zip(roots, i.shapes, strict=False):
        while part.opcode in _THROUGH and part.operands:
            part = body.by_name[part.operands[0]]
        if part.opcode == "dynamic-update-slice":
            written += 0.0 if shape.fast else float(body.by_name[part.operands[1]].shapes[0].bytes)
        else:
            written += _in_memory([shape])
    return written


def _flops(inside: Computation, i: Instruction) -> float | None:
    """FLOPs of one instruction; None for a kernel that may compute much and does not say how much."""
    if i.opcode == "custom-call":
        return kernel_flops(inside, i)
    if i.opcode not in ("dot", "convolution", "ragged-dot"):
        return 0.0
    left, right = (inside.by_name[name].shapes[0].dims for name in i.operands[:2])
    out = math.prod(i.shapes[0].dims)
    if i.opcode == "ragged-dot":
        return 2.0 * out * left[-1] * right[0]  # as XLA:CPU runs it: every row against every group
    if i.opcode == "dot":
        contracted = i.attribute("lhs_contracting_dims")
        return 2.0 * out * math.prod(left[int(d)] for d in contracted.split(",") if d)
    return _convolution(i, left, right)


def _convolution(i: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """2 x (batch) x (output features) x (input features of a group) x the pairs (place, tap) that meet no padding."""
    inputs, kernel, output = re.split(r"_|->", i.attribute("dim_labels"))
    window = dict(pair.split("=") for pair in i.attribute("window").split())
    shape = i.shapes[0].dims

    def of(key: str, axis: int, default: str) -> str:
        return window[key].split("x")[axis] if key in window else default

    pairs = 1
    for axis in range(len(inputs) - 2):
        size, taps = left[inputs.index(str(axis))], right[kernel.index(str(axis))]
        stride, low = int(of("stride", axis, "1")), int(of("pad", axis, "0_0").split("_")[0])
        spread, apart = int(of("lhs_dilate", axis, "1")), int(of("rhs_dilate", axis, "1"))
        places = (
            place * stride - low + tap * apart for place in range(shape[output.index(str(axis))]) for tap in range(taps)
        )
        pairs *= sum(0 <= p < (size - 1) * spread + 1 and p % spread == 0 for p in places)
    groups = int(i.attribute("batch_group_count") or 1)
    batch, features = shape[output.index("b")], shape[output.index("f")]
    return 2.0 * batch * features * right[kernel.index("i")] * pairs / groups
