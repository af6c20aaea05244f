"""Compiled HLO, read from its text into instructions: shapes, operands, and what they call.

`cost_analysis` counts the body of a loop once and knows nothing of GPUs; the text of the optimised module has all that
is needed on every platform. Format: openxla.org/xla/operation_semantics and what `compiled.as_text()` prints.
"""

import dataclasses
import functools
import math
import re

__all__ = ["Computation", "Instruction", "Module", "Shape", "parse", "trip_count"]

_BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "s1": 1, "u1": 1}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_END = re.compile(r"^\}(,|$)")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation|async_execution)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array; fast: it is in on-chip memory (space 1), so that moving it takes no bandwidth of the main memory."""

    dtype: str
    dims: tuple[int, ...]
    fast: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        digits = re.search(r"\d+", self.dtype)
        bits = _BITS.get(self.dtype, int(digits[0]) if digits else 0)
        return -(-self.size * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """shapes: the result's, of a tuple each part's. attributes: what follows the operands, as printed."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    literal: str  # between the brackets: a constant's value, a parameter's number

    def attribute(self, key: str) -> str:
        """The value of `key=...`, without its braces; empty if it is not there."""
        match = re.search(rf"\b{key}=(?:\{{([^}}]*)\}}|([^,\s]+))", self.attributes)
        return "" if match is None else match[1] if match[1] is not None else match[2]

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that run with it, the condition of a loop left out."""
        return tuple(_CALLED.findall(self.attributes)) + self.branches

    @property
    def branches(self) -> tuple[str, ...]:
        names = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        return tuple(_NAME.findall(names[1])) if names else ()


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]
    root: str

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {i.name: [] for i in self.instructions}
        for i in self.instructions:
            for operand in i.operands:
                if operand in users:
                    users[operand].append(i)
        return users

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        return sorted((i for i in self.instructions if i.opcode == "parameter"), key=lambda i: int(i.literal))


@dataclasses.dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: Computation


def parse(text: str) -> Module:
    """The module of `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry, name, root, lines = "", "", "", []
    for line in text.splitlines():
        if not name:
            head = _HEAD.match(line)
            if head:
                name, root, lines = head[2], "", []
                entry = name if head[1] else entry
        elif _END.match(line):
            computations[name] = Computation(name, tuple(_instruction(*parts) for parts in lines), root)
            name = ""
        elif match := _LINE.match(line):
            lines.append((match[2], match[3]))
            root = match[2] if match[1] else root
        elif lines:  # an attribute holds a line break
            lines[-1] = lines[-1][0], f"{lines[-1][1]} {line}"
    if not entry:
        raise ValueError("this text holds no ENTRY computation; give the text of a compiled program")
    return Module(computations, computations[entry])


def _instruction(name: str, rest: str) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opened = rest.index("(")
    closed = _closing(rest, opened)
    inside = rest[opened + 1 : closed]
    return Instruction(
        name=name,
        opcode=rest[:opened],
        shapes=tuple(_shape(*match) for match in _SHAPE.findall(kind)),
        operands=tuple(_NAME.findall(inside)),
        attributes=rest[closed + 1 :],
        literal=inside,
    )


def _shape(dtype: str, dims: str, layout: str) -> Shape:
    return Shape(dtype, tuple(int(d.strip("<= ")) for d in dims.split(",") if d.strip()), "S(1)" in layout)


def _closing(text: str, opened: int) -> int:
    """The bracket that closes the one at `opened`."""
    depth = 0
    for i in range(opened, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"unbalanced brackets in {text[:80]!r}")


def trip_count(module: Module, inside: Computation, loop: Instruction) -> int | None:
    """How often a `while` runs; None where its bound is known only at run time.

    As the compiler noted it, otherwise of a condition `i < n` (or `n > i`) with a constant n and start. A loop in the
    named scope `usually_once` counts as one turn.
    """
    known = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.attributes)
    if known:
        return int(known[1])
    if 'usually_once/while"' in loop.attributes:  # the rounds of expert_parallel.py
        return 1
    condition = module.computations[loop.attribute("condition").lstrip("%")]
    test = condition.by_name[condition.root]
    less = {"LT": (0, 1), "GT": (1, 0)}.get(test.attribute("direction"))
    if test.opcode != "compare" or less is None:
        return None
    start_of, bound = (condition.by_name[test.operands[i]] for i in less)
    start, stop = _carried(inside, loop, start_of), _value(inside, loop, bound)
    return None if start is None or stop is None else max(0, stop - start)


def _value(inside: Computation, loop: Instruction, i: Instruction) -> int | None:
    """Of a constant, or of a carried value, which is then one that the loop does not change."""
    return int(i.literal) if i.opcode == "constant" else _carried(inside, loop, i)


def _carried(inside: Computation, loop: Instruction, i: Instruction) -> int | None:
    """What a part of the carried tuple holds when the loop starts."""
    if i.opcode != "get-tuple-element":
        return None
    start = inside.by_name[loop.operands[0]]
    if start.opcode != "tuple":
        return None
    part = inside.by_name[start.operands[int(i.attribute("index"))]]
    while part.opcode in ("copy", "bitcast", "convert") and part.operands:
        part = inside.by_name[part.operands[0]]
    return int(part.literal) if part.opcode == "constant" and part.literal.lstrip("-").isdigit() else None
