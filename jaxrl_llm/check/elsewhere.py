"""Rows of a check for chips that are not here: nothing is rehearsed, memory and time are those of a plan."""

import dataclasses
from collections.abc import Callable

from jaxrl_llm.check import data_rows
from jaxrl_llm.check.findings import LOOK, STOP, Finding, stopped
from jaxrl_llm.check.fits import Fits, beside, stays_of
from jaxrl_llm.check.rehearsal_rows import duration
from jaxrl_llm.plan.chips import topology_devices
from jaxrl_llm.plan.table import Compiled, compile_for, measured, trace_run
from jaxrl_llm.run.assembly import Run, build
from jaxrl_llm.run.blocks import Settings


def rows(settings: Settings, topology: str, note: Callable[[str], None], compiles: bool = True) -> list[Finding]:
    """The rows that need no model, where data can be read here, and memory and time on the chips of a topology.

    Args:
      compiles: otherwise the programs are only traced: the same times, and of the memory what stays.

    Raises:
      ValueError: an unknown topology, one whose devices the mesh does not fit, or a run that samples on servers.
      ImportError: the compiler of this chip is not installed.
    """
    chip, devices = topology_devices(topology)
    run = build(settings, devices)
    found, programs = _data(run), trace_run(run, devices)
    fits = Fits(stays_of(run, programs), {}, int(chip.memory))
    made = [measured(run, program, None, chip) for program in programs]
    memory = _memory(fits)
    if compiles and memory.verdict != STOP:
        names = list(dict.fromkeys(program.name for program in programs))
        note(f"compiling {', '.join(names)} for {topology}: maybe minutes")
        needed = dict.fromkeys(names, 0)
        for program in programs:
            needed[program.name] = max(needed[program.name], beside(program, compile_for(program, devices)))
        memory = _memory(dataclasses.replace(fits, programs=needed))
    return [*found, memory, _time(settings, made)]


def _data(run: Run) -> list[Finding]:
    try:
        return data_rows.rows(run, data_rows.examples_of(run))
    except (ValueError, ImportError, OSError) as error:  # they lie where the run will be
        seen, _, remedy = str(error).rpartition("; ")
        return [Finding("data", f"cannot be read here: {seen or remedy}", LOOK, remedy if seen else "")]


def _memory(fits: Fits) -> Finding:
    """The bytes of a device, as far as they are known; a stop if it has less."""
    try:
        fits.check()
    except ValueError as error:
        return stopped("memory", error)
    seen = " ".join(fits.lines())
    if fits.programs:
        return Finding("memory", f"predicted {seen}")
    return Finding("memory", f"at least {seen}", LOOK, "leave out --trace: the compiler says the rest")


def _time(s: Settings, made: list[Compiled]) -> Finding:
    """Seconds of a step at the peaks of the chips, without the network, and of all steps."""
    seconds: dict[str, float] = {}
    for part, line in (pair for program in made for pair in program.parts):
        seconds[part.name] = seconds.get(part.name, 0.0) + part.times * line.seconds
    step, each = sum(seconds.values()), ", ".join(f"{name} {x:.3g}" for name, x in seconds.items())
    seen = f"{s.steps} steps of at least {step:.3g} s ({each}), by the peaks of the chips: {duration(s.steps * step)}"
    return Finding("time ahead", seen)
