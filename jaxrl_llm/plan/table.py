"""The figures of a compiled run: what each of its programs needs of a device, as a table for a terminal and as JSON."""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

from jaxrl_llm.ground.sharding import AXES, resolved
from jaxrl_llm.plan.chips import Chip, topology_devices
from jaxrl_llm.plan.programs import Program, compile_run
from jaxrl_llm.plan.roofline import roofline
from jaxrl_llm.plan.wires import Wires
from jaxrl_llm.run.settings import Settings

_GIB = 2**30


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
    programs = tuple(compile_run(settings, devices, only))
    mesh = _sizes(settings.mesh.shape, len(devices))
    rollout_mesh = _sizes(settings.rollout.mesh_shape or mesh, math.prod(mesh))
    return Compiled(topology, chip, mesh, rollout_mesh, settings.model.active_parameters, programs)


def _sizes(shape: Sequence[int], devices: int) -> tuple[int, ...]:
    """The shape of a mesh with the number that -1 stands for."""
    return resolved(shape, devices)[: len(shape)]


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
        for line in [roofline(part, Wires(compiled.chip, program.mesh), compiled.active_parameters)]
    ]


def as_json(compiled: Compiled) -> str:
    """The figures with topology, mesh and versions."""
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")
    head = {
        "topology": compiled.topology,
        "mesh": compiled.mesh,
        "rollout_mesh": compiled.rollout_mesh,
        "versions": {name: metadata.version(name) for name in packages if any(metadata.distributions(name=name))},
        "chip": dataclasses.asdict(compiled.chip),
        "parts": as_rows(compiled),
    }
    return json.dumps(head, indent=1) + "\n"


def table(compiled: Compiled) -> str:
    """Four tables that fit 80 columns: memory, time, a step of training, and the network by axes of the mesh."""
    lines = [f"{compiled.topology}: {compiled.devices} devices, {_axes(compiled.mesh)}; each device:"]
    if compiled.rollout_mesh != compiled.mesh:
        lines.append(f"rollouts on {_axes(compiled.rollout_mesh)}")
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
        cells = [_short(x) for x in (r["flops"] / 1e12, r["flops_over_model"], r["bytes"] / 1e9, r["sent"] / 1e9)]
        cells += [_short(t) + ("*" if t == max(times) else " ") for t in times] + [f"{r['mfu']:.0%}"]
        lines.append(f"{r['part']:8}" + "".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)))
    lines += ["* what bounds it", "", "a step      times     ms each         s"]
    for r in rows:
        each, whole = _short(1e3 * r["step_s"] / r["times"]), _short(r["step_s"])
        lines.append(f"{r['part']:8}{r['times']:9}{each:>12}{whole:>10}")
    lines += ["at least, with answers at their bound", ""]
    lines += ["network  over axes               bound by       GB sent        ms"]
    for r in rows:
        for row in r["wires"] or [{"axes": ["none"], "link": "", "sent": 0, "seconds": 0, "collectives": {}}]:
            most = "*" if r["bound"] == "network" and row == r["wires"][0] else " "
            figures = _short(row["sent"] / 1e9).rjust(8) + _short(1e3 * row["seconds"]).rjust(10)
            lines.append(f"{r['part']:8} {', '.join(row['axes']):23} {row['link']:13}{figures}{most}".rstrip())
            each = [f"{kind} {count:.0f}, {size / 1e9:.3g}" for kind, (count, size) in row["collectives"].items()]
            lines += _wrapped("", each) if each else []
    lines.append("* the slowest where the network bounds; below each its collectives: how many, GB")
    unknown = sorted({name for r in rows for name in r["not_counted"]})
    return "\n".join(lines + ([f"FLOPs not counted of: {', '.join(unknown)}"] if unknown else []))


def _axes(mesh: tuple[int, ...]) -> str:
    return " x ".join(f"{name} {size}" for name, size in zip(AXES, mesh, strict=False))


def _short(x: float) -> str:
    """Three digits, in at most seven characters."""
    if 1000 <= x < 1e6:
        return f"{x:.0f}"
    return f"{x:.3g}" if len(f"{x:.3g}") <= 7 else f"{x:.0e}"


def _wrapped(name: str, parts: Iterable[str]) -> list[str]:
    """`name` and its parts, as many to a line as fit 80 columns."""
    lines = [f"{name:9}"]
    for part in parts:
        full = len(lines[-1]) + len(part) + 3 > 80
        lines = [*lines, f"{'':9} {part}"] if full else [*lines[:-1], f"{lines[-1]}{';' * (len(lines[-1]) > 9)} {part}"]
    return lines
