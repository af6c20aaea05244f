"""The figures of a compiled run read off XLA's own text of it: memory, FLOPs, bytes and collectives over their wires.

`jaxrl_llm.plan` gives the memory, the FLOPs of the jaxpr and a roofline without the network.
"""

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import Mesh

from experiments.scale.hlo import parse
from experiments.scale.hlo_cost import Cost, measure
from experiments.scale.wires import LINKS, Traffic, Wires
from jaxrl_llm.ground import sharding
from jaxrl_llm.models import filled
from jaxrl_llm.plan import programs
from jaxrl_llm.plan.chips import Chip, topology_devices
from jaxrl_llm.plan.table import compile_for, named_axes, short, trace_run
from jaxrl_llm.run.assembly import build
from jaxrl_llm.run.settings import Settings

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a step's work, with its cost on one device; the other fields are those of `plan.programs.Part`."""

    name: str
    cost: Cost
    tokens: int
    times: int
    passes: int


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program: its bytes on each device, the seconds that it took to compile, its parts."""

    name: str
    arguments: int
    outputs: int
    temporaries: int
    code: int
    seconds: float
    parts: tuple[Part, ...]
    mesh: Mesh  # its devices, in the program's order

    @property
    def memory(self) -> int:
        """Bytes in use while it runs; outputs that reuse an argument's memory are counted once."""
        return self.arguments + self.outputs + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds at the peaks. If compute, memory and network overlap completely, the time is the largest of the three.

    The model needs 2 x passes x active parameters x tokens FLOPs, without attention's products.
    """

    compute: float
    memory: float
    network: float  # of all collectives, one after the other
    traffic: tuple[Traffic, ...]
    excess: float  # FLOPs of all devices over the model's; 0 for a part that computes nothing
    mfu: float  # the model's FLOPs over what the chips could do in that time (PaLM, arXiv 2204.02311, appendix B)

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.network)

    @property
    def bound(self) -> str:
        return max(("compute", "memory", "network"), key=lambda name: getattr(self, name))


def roofline(part: Part, chip: Chip, wires: Wires, active_parameters: int) -> Roofline:
    """The roofline of a part on a chip with these wires."""
    cost, traffic = part.cost, tuple(wires.traffic(part.cost))
    times = (cost.flops / chip.flops, cost.bytes / chip.bandwidth, sum((row.seconds for row in traffic), 0.0))
    model = 2.0 * part.passes * active_parameters * part.tokens / wires.mesh.size
    mfu = model / (max(times) * chip.flops) if max(times) else 0.0
    return Roofline(*times, traffic=traffic, excess=cost.flops / model if model else 0.0, mfu=mfu)


def _measured(program: programs.Program, compiled: Any, seconds: float) -> Program:
    memory, mesh = compiled.memory_analysis(), program.mesh
    share = filled(ragged=sharding.platform(mesh) == "tpu") if mesh.shape["expert"] > 1 else 1.0
    once, turn = measure(parse(compiled.as_text()), mesh.size, share)
    return Program(
        name=program.name,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        seconds=seconds,
        parts=tuple(
            Part(part.name, once * part.outside + turn * part.turns, part.tokens, part.times, part.passes)
            for part in program.parts
        ),
        mesh=mesh,
    )


@dataclasses.dataclass(frozen=True)
class Compiled:
    topology: str
    chip: Chip
    mesh: tuple[int, ...]
    rollout_mesh: tuple[int, ...]
    active_parameters: int
    programs: tuple[Program, ...]

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)


def plan(settings: Settings, topology: str, only: Sequence[str] = ()) -> Compiled:
    """Compile the run's programs (or only some of move, rollout, score and update) for a topology.

    Raises:
      ValueError: an unknown topology, or one whose devices the mesh does not fit.
      ImportError: the compiler of this chip is not installed.
    """
    chip, devices = topology_devices(topology)
    run, found, start = build(settings, devices), [], time.monotonic()
    for program in trace_run(run, devices, only):
        found.append(_measured(program, compile_for(program, devices), time.monotonic() - start))
        start = time.monotonic()
    meshes = [tuple(mesh.shape.values()) for mesh in (run.model.mesh, run.sampler.mesh) if mesh is not None]
    return Compiled(topology, chip, meshes[0], meshes[1], settings.model.active_parameters, tuple(found))


def as_rows(compiled: Compiled) -> list[dict[str, Any]]:
    """One JSON object for each part of a program; bytes, FLOPs and seconds are those of one device."""
    return [
        {
            "part": part.name,
            "program": program.name,
            **{name: getattr(program, name) for name in ("arguments", "outputs", "temporaries", "code")},
            "memory_share": program.memory / compiled.chip.memory,
            "compile_s": round(program.seconds, 1),
            "tokens": part.tokens,
            "times": part.times,
            "flops": part.cost.flops,
            "bytes": part.cost.bytes,
            "sent": part.cost.sent,
            "collectives": {kind: list(value) for kind, value in sorted(part.cost.collectives.items())},
            "not_counted": sorted(part.cost.unknown),
            "compute_s": line.compute,
            "memory_s": line.memory,
            "network_s": line.network,
            "wires": [dataclasses.asdict(row) for row in line.traffic],
            "bound": line.bound,
            "step_s": line.seconds * part.times,
            "flops_over_model": line.excess,
            "mfu": line.mfu,
        }
        for program in compiled.programs
        for part in program.parts
        for line in [roofline(part, compiled.chip, wires(compiled, program), compiled.active_parameters)]
    ]


def wires(compiled: Compiled, program: Program) -> Wires:
    """The wires between the devices of a program."""
    return Wires(LINKS[compiled.topology.partition(":")[0]], program.mesh)


def table(compiled: Compiled) -> str:
    """Four tables that fit 80 columns: memory, time, a step of training, and the network by axes of the mesh."""
    lines = [f"{compiled.topology}: {compiled.devices} devices, {named_axes(compiled.mesh)}; each device:"]
    if compiled.rollout_mesh != compiled.mesh:
        lines.append(f"rollouts on {named_axes(compiled.rollout_mesh)}")
    lines += ["", "GiB       arguments  outputs  temporaries   code  of memory  compile s"]
    for p in compiled.programs:
        lines.append(
            f"{p.name:9} {p.arguments / _GIB:9.2f} {p.outputs / _GIB:8.2f} {p.temporaries / _GIB:12.2f} "
            f"{p.code / _GIB:6.2f} {p.memory / compiled.chip.memory:10.0%} {p.seconds:10.0f}"
        )
    lines += ["", "at peak    TFLOP x model GB moved GB sent compute ms memory ms network ms  MFU"]
    widths = (8, 8, 9, 8, 11, 10, 11, 5)
    rows = as_rows(compiled)
    for r in rows:
        times = [1e3 * r[name] for name in ("compute_s", "memory_s", "network_s")]
        cells = [short(x) for x in (r["flops"] / 1e12, r["flops_over_model"], r["bytes"] / 1e9, r["sent"] / 1e9)]
        cells += [short(t) + ("*" if t == max(times) else " ") for t in times] + [f"{r['mfu']:.0%}"]
        lines.append(f"{r['part']:8}" + "".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)))
    lines += ["* what bounds it", "", "a step      times     ms each         s"]
    for r in rows:
        each, whole = short(1e3 * r["step_s"] / r["times"]), short(r["step_s"])
        lines.append(f"{r['part']:8}{r['times']:9}{each:>12}{whole:>10}")
    lines += ["at least, with answers at their bound", ""]
    lines += ["network  over axes               bound by       GB sent        ms"]
    for r in rows:
        for row in r["wires"] or [{"axes": ["none"], "link": "", "sent": 0, "seconds": 0, "collectives": {}}]:
            most = "*" if r["bound"] == "network" and row == r["wires"][0] else " "
            figures = short(row["sent"] / 1e9).rjust(8) + short(1e3 * row["seconds"]).rjust(10)
            lines.append(f"{r['part']:8} {', '.join(row['axes']):23} {row['link']:13}{figures}{most}".rstrip())
            each = [f"{kind} {count:.0f}, {size / 1e9:.3g}" for kind, (count, size) in row["collectives"].items()]
            lines += _wrapped("", each) if each else []
    lines.append("* the slowest where the network bounds; below each its collectives: how many, GB")
    unknown = sorted({name for r in rows for name in r["not_counted"]})
    return "\n".join(lines + ([f"FLOPs not counted of: {', '.join(unknown)}"] if unknown else []))


def _wrapped(name: str, parts: Iterable[str]) -> list[str]:
    """`name` and its parts, as many to a line as fit 80 columns."""
    lines = [f"{name:9}"]
    for part in parts:
        full = len(lines[-1]) + len(part) + 3 > 80
        lines = [*lines, f"{'':9} {part}"] if full else [*lines[:-1], f"{lines[-1]}{';' * (len(lines[-1]) > 9)} {part}"]
    return lines
