"""python -m jaxrl_llm.plan --config NAME --topology v5p:4x4x4 [--config.mesh.shape=...] [--json OUT]

Compiles the programs of a run for chips that need not be present, and reports what each needs: memory, FLOPs, bytes,
collectives, the time at the chip's peaks and what bounds it.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

from jaxrl_llm.ground.sharding import AXES
from jaxrl_llm.plan.chips import Chip, topology_devices
from jaxrl_llm.plan.programs import Program, compile_run
from jaxrl_llm.plan.roofline import roofline
from jaxrl_llm.run.settings import Settings

__all__ = ["Plan", "as_json", "as_rows", "plan", "table"]

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs of each device of a topology."""

    topology: str
    chip: Chip
    mesh: tuple[int, ...]
    rollout_mesh: tuple[int, ...]
    active_parameters: int
    programs: tuple[Program, ...]

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)


def plan(settings: Settings, topology: str, only: Sequence[str] = ()) -> Plan:
    """Compile the run's programs (or `only` some: move, rollout, score, update) for a topology.

    Raises:
      ValueError: an unknown topology, or one whose devices the mesh does not fit.
      ImportError: the compiler of this chip is not installed.
    """
    chip, devices = topology_devices(topology)
    programs = tuple(compile_run(settings, devices, only))
    mesh = _sizes(settings.mesh.shape, len(devices))
    rollout_mesh = _sizes(settings.rollout.mesh_shape or mesh, math.prod(mesh))
    return Plan(topology, chip, mesh, rollout_mesh, settings.model.active_parameters, programs)


def _sizes(shape: Sequence[int], devices: int) -> tuple[int, ...]:
    """The shape of a mesh with the number that -1 stands for."""
    rest = devices // -math.prod(shape) if -1 in shape else 0
    return tuple(rest if size == -1 else size for size in shape)


def as_rows(plan: Plan) -> list[dict[str, Any]]:
    """One JSON object a part of a program; bytes, FLOPs and seconds of one device."""
    rows = []
    for program in plan.programs:
        for part in program.parts:
            line = roofline(part, plan.chip, plan.devices, plan.active_parameters)
            rows.append(
                {
                    "part": part.name,
                    "program": program.name,
                    "arguments": program.arguments,
                    "outputs": program.outputs,
                    "temporaries": program.temporaries,
                    "code": program.code,
                    "memory_share": program.memory / plan.chip.memory,
                    "compile_s": round(program.seconds, 1),
                    "tokens": part.tokens,
                    "flops": part.cost.flops,
                    "bytes": part.cost.bytes,
                    "sent": part.cost.sent,
                    "collectives": {kind: list(value) for kind, value in sorted(part.cost.collectives.items())},
                    "not_counted": sorted(part.cost.unknown),
                    "compute_s": line.compute,
                    "memory_s": line.memory,
                    "network_s": line.network,
                    "bound": line.bound,
                    "flops_over_model": line.excess,
                    "mfu": line.mfu,
                }
            )
    return rows


def as_json(plan: Plan) -> str:
    """The figures with topology, mesh and versions."""
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin") if _has(name)}
    head = {"topology": plan.topology, "mesh": plan.mesh, "rollout_mesh": plan.rollout_mesh, "versions": versions}
    head |= {"chip": dataclasses.asdict(plan.chip)}
    return json.dumps(head | {"parts": as_rows(plan)}, indent=1) + "\n"


def _has(package: str) -> bool:
    return any(metadata.distributions(name=package))


def table(plan: Plan) -> str:
    """Three tables that fit 80 columns: memory, time, collectives."""
    lines = [f"{plan.topology}: {plan.devices} devices, {_axes(plan.mesh)}; each device:"]
    lines += [f"rollouts on {_axes(plan.rollout_mesh)}"] * (plan.rollout_mesh != plan.mesh) + [""]
    lines.append("GiB       arguments  outputs  temporaries   code  of memory  compile s")
    for p in plan.programs:
        sizes = (x / _GIB for x in (p.arguments, p.outputs, p.temporaries, p.code))
        first, second, third, fourth = sizes
        share = f"{p.memory / plan.chip.memory:.0%}"
        lines.append(f"{p.name:9} {first:9.2f} {second:8.2f} {third:12.2f} {fourth:6.2f} {share:>10} {p.seconds:10.0f}")
    heads = ("TFLOP", "x model", "GB moved", "GB sent", "compute ms", "memory ms", "network ms", "MFU")
    widths = (8, 8, 9, 8, 11, 10, 11, 5)
    lines += ["", "at peak " + "".join(head.rjust(width) for head, width in zip(heads, widths, strict=True))]
    rows = as_rows(plan)
    for r in rows:
        amounts = (r["flops"] / 1e12, r["flops_over_model"], r["bytes"] / 1e9, r["sent"] / 1e9)
        times = [1e3 * r[name] for name in ("compute_s", "memory_s", "network_s")]
        cells = [_short(x) for x in amounts]
        cells += [_short(t) + ("*" if t == max(times) else " ") for t in times] + [f"{r['mfu']:.0%}"]
        lines.append(f"{r['part']:8}" + "".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)))
    lines += ["* what bounds it", "", "collectives: how many, GB sent"]
    for r in rows:
        each = [f"{kind} {count:.0f}, {size / 1e9:.3g}" for kind, (count, size) in r["collectives"].items()]
        lines += _wrapped(r["part"], each or ["none"])
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
