"""The figures of a compiled run: what each of its programs needs of a device, as a table for a terminal and as JSON."""

import dataclasses
import json
import math
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import shapes_for_arrays
from jaxrl_llm.plan import PROGRAMS
from jaxrl_llm.plan.chips import Chip, lowering_for, topology_devices
from jaxrl_llm.plan.jaxpr_flops import flops_of
from jaxrl_llm.plan.programs import Part, Program, programs
from jaxrl_llm.plan.roofline import Roofline, bytes_of, roofline
from jaxrl_llm.run.assembly import Run, build
from jaxrl_llm.run.settings import Settings

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One program: its bytes on each device and the roofline of each of its parts. Of one that is traced only, the
    arguments are those that stay, and the others are None."""

    name: str
    arguments: int
    outputs: int | None
    temporaries: int | None
    code: int | None
    parts: tuple[tuple[Part, Roofline], ...]

    @property
    def memory(self) -> int:
        """Bytes in use while it runs, as far as they are known; outputs that reuse an argument's memory are counted
        once."""
        return self.arguments + sum(size or 0 for size in (self.outputs, self.temporaries, self.code))


@dataclasses.dataclass(frozen=True)
class Plan:
    topology: str
    chip: Chip
    mesh: tuple[int, ...]
    rollout_mesh: tuple[int, ...]
    programs: tuple[Compiled, ...]


def plan(settings: Settings, topology: str, only: Sequence[str] = (), compiles: bool = True) -> Plan:
    """Compile, or only trace, the run's programs (or some of move, rollout, score and update) for a topology.

    Raises:
      ValueError: an unknown topology, one whose devices the mesh does not fit, or a run that samples on servers.
      ImportError: the compiler of this chip is not installed.
    """
    chip, devices = topology_devices(topology)
    run = build(settings, devices)
    found = tuple(
        measured(run, program, compile_for(program, devices) if compiles else None, chip)
        for program in trace_run(run, devices, only)
    )
    mesh, sampling = _sizes(run.model.mesh), _sizes(run.sampler.mesh)
    return Plan(topology, chip, mesh, sampling, found)


def trace_run(run: Run, devices: Sequence[Any], only: Sequence[str] = ()) -> list[Program]:
    """Trace the programs of a run, or some of them, for these devices.

    Raises:
      ValueError: a run that samples on servers.
    """
    s = run.settings
    if s.objective.reads == "rollouts" and s.rollout.engine != "jax":
        raise ValueError(f"rollout.engine={s.rollout.engine!r} samples on servers; to plan a run, set it to jax")
    with lowering_for(devices[0]):
        return programs(run, only or PROGRAMS)


def compile_for(program: Program, devices: Sequence[Any]) -> jax.stages.Compiled:
    """Compile a program for these devices, which need not be there."""
    with lowering_for(devices[0]), shapes_for_arrays():
        lowered = program.traced.lower()
    return lowered.compile()


def measured(run: Run, program: Program, compiled: jax.stages.Compiled | None, chip: Chip) -> Compiled:
    """Return the figures of a program, compiled or only traced, on each device."""
    devices = program.mesh.size
    once, turn = (flops / devices for flops in flops_of(program.traced.jaxpr.jaxpr, devices))
    parts = []
    for part in program.parts:
        flops, moved = part.outside * once + part.turns * turn, bytes_of(run, part)
        parts.append((part, roofline(part, flops, moved, chip, devices, run.settings.model.active_parameters)))
    if compiled is None:
        stays, engine = program.stays, getattr(run.source, "engine", None)
        if stays is None and engine is not None:  # a rollout on a mesh of its own
            stays = engine.prepared_shapes(run.model.shapes())
        return Compiled(program.name, sharding.local_bytes(stays), None, None, None, tuple(parts))
    memory: Any = compiled.memory_analysis()
    return Compiled(
        name=program.name,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        parts=tuple(parts),
    )


def _sizes(mesh: Mesh | None) -> tuple[int, ...]:
    assert mesh is not None
    return tuple(mesh.shape.values())


def as_rows(made: Plan) -> list[dict[str, Any]]:
    """One JSON object for each part of a program; bytes, FLOPs and seconds are those of one device."""
    return [
        {
            "part": part.name,
            "program": program.name,
            **{name: getattr(program, name) for name in ("arguments", "outputs", "temporaries", "code")},
            "memory_share": program.memory / made.chip.memory,
            "tokens": part.tokens,
            "times": part.times,
            **dataclasses.asdict(line),
            "bound": line.bound,
            "step_s": line.seconds * part.times,
        }
        for program in made.programs
        for part, line in program.parts
    ]


def as_json(made: Any, rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of a plan with its topology, mesh, chip and versions."""
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")
    head = {
        "topology": made.topology,
        "mesh": made.mesh,
        "rollout_mesh": made.rollout_mesh,
        "versions": {name: metadata.version(name) for name in packages if any(metadata.distributions(name=name))},
        "chip": dataclasses.asdict(made.chip),
        "parts": rows,
    }
    return json.dumps(head, indent=1) + "\n"


def table(made: Plan) -> str:
    """Three tables that fit 80 columns: memory, time at the peaks, and a step of training."""
    lines = [f"{made.topology}: {math.prod(made.mesh)} devices, {named_axes(made.mesh)}"]
    if made.rollout_mesh != made.mesh:
        lines.append(f"rollouts on {named_axes(made.rollout_mesh)}")
    lines += ["each device:", "", "GiB, by XLA  arguments  outputs  temporaries   code  of memory"]
    for p in made.programs:
        sizes = (
            "" if size is None else f"{size / _GIB:.2f}" for size in (p.arguments, p.outputs, p.temporaries, p.code)
        )
        cells = "".join(size.rjust(width) for size, width in zip(sizes, (10, 9, 13, 7), strict=True))
        lines.append(f"{p.name:12}{cells} {p.memory / made.chip.memory:10.0%}")
    if made.programs[0].temporaries is None:
        lines.append("not compiled: weights and state, which stay, without a cache or temporaries")
    lines += ["", "at peak        TFLOP  x model  GB read  compute ms  memory ms   MFU"]
    rows = as_rows(made)
    for r in rows:
        cells = [short(x) for x in (r["flops"] / 1e12, r["flops_over_model"], r["bytes"] / 1e9)]
        cells += [short(1e3 * r[f"{kind}_s"]) + ("*" if r["bound"] == kind else " ") for kind in ("compute", "memory")]
        cells.append(f"{r['mfu']:.0%}")
        widths = (8, 9, 9, 12, 11, 6)
        lines.append(f"{r['part']:12}" + "".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)))
    lines += [
        "* what bounds it: FLOPs of the program's products, or weights and cache once;",
        "without the network",
        "",
    ]
    lines += ["a step          times     ms each         s"]
    for r in rows:
        each, whole = short(1e3 * r["step_s"] / r["times"]), short(r["step_s"])
        lines.append(f"{r['part']:12}{r['times']:9}{each:>12}{whole:>10}")
    return "\n".join([*lines, "at least, with answers at their bound"])


def named_axes(mesh: tuple[int, ...]) -> str:
    """Return the sizes of a mesh with the names of its axes."""
    return " x ".join(f"{name} {size}" for name, size in zip(sharding.AXES, mesh, strict=False))


def short(x: float) -> str:
    """Return three digits, in at most seven characters."""
    if 1000 <= x < 1e6:
        return f"{x:.0f}"
    return f"{x:.3g}" if len(f"{x:.3g}") <= 7 else f"{x:.0e}"
