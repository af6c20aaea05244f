"""Does a run fit the memory of its devices? Its own programs are compiled from shapes, and XLA says what each needs.

    needed = what stays + the most that one program takes beside it

What stays (parameters, moments, a reference, a critic, rollouts in flight) is exact. Training then runs the same
compiled programs, so nothing is compiled twice. On a CPU, where one memory holds everything, the process is counted
with its compiled programs, and the copy that a checkpoint is written from with what is encoded of it.
"""

import dataclasses
import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.ground import machine, sharding
from jaxrl_llm.ground.array_typing import shapes_for_arrays
from jaxrl_llm.plan.programs import Program, abstract_state, programs
from jaxrl_llm.run.assembly import Run
from jaxrl_llm.training.state import TrainState

_NAMES = ("move", "rollout", "score", "reward model", "update", "evaluation")
_WRITTEN = 2.3  # copies of the state while Orbax writes it: one, and what is encoded of it; measured


@dataclasses.dataclass(frozen=True)
class Fits:
    """Bytes on each device: what stays through the run, and what each program takes beside it while it runs."""

    stays: Mapping[str, int]
    programs: Mapping[str, int]
    available: int | None  # of one device, None where it is not known
    process: int = 0  # on a CPU, what is no array: the interpreter, libraries, programs

    @property
    def arrays(self) -> int:
        return sum(self.stays.values()) + max(self.programs.values(), default=0)

    @property
    def total(self) -> int:
        return self.arrays + self.process

    def lines(self) -> list[str]:
        """The total and its parts in lines of at most 69 characters."""
        has = "" if self.available is None else f" of {spelled(self.available)}"
        parts = {"process": self.process} if self.process else {}
        sizes = (f"{name} {spelled(size)}" for name, size in {**parts, **self.stays, **self.programs}.items())
        return textwrap.wrap(f"{spelled(self.total)}{has} a device: {', '.join(sizes)}", 69)

    def check(self) -> None:
        """Raises ValueError when a device has less memory than the run needs."""
        if self.available is None or self.total <= self.available:
            return
        most = max(self.programs, key=lambda name: self.programs[name], default="")
        if sum(self.stays.values()) + self.process > self.available:
            most = "frozen base" if "frozen base" in self.stays else "parameters"
        raise ValueError(
            f"the run needs {spelled(self.total)} on each device, which has {spelled(self.available)} "
            f"({' '.join(self.lines())}); {_REMEDIES[most]}"
        )


_UPDATES = "lower updates.micro_batch_rows, or set model.remat=block"
_REMEDIES = {
    "parameters": "spread them over more devices with mesh.shape, or train adapters alone with lora.rank=16",
    "frozen base": "spread it over more devices with mesh.shape, or set model.param_dtype=bfloat16: it is not trained",
    "move": "spread the model over more devices with rollout.mesh_shape, or set rollout.dtype=bfloat16",
    "rollout": "lower rollout.slots or rollout.max_new_tokens, or set rollout.dtype=bfloat16",
    "score": _UPDATES,
    "reward model": _UPDATES,
    "update": _UPDATES,
    "checkpoint": "spread the model over more devices with mesh.shape, or train adapters alone with lora.rank=16",
    "evaluation": "lower rollout.slots, rollout.max_new_tokens or evaluation.prompts",
}


@shapes_for_arrays()
def fits(run: Run, note: Callable[[str], None] = lambda text: None) -> Fits:
    """Compile the programs of a run and say what they need.

    Raises:
      ValueError: what stays is already more than a device has; nothing was compiled then.
    """
    assert run.model.mesh is not None
    found, available = programs(run, _NAMES), available_bytes(run.model.mesh)
    said = Fits(stays_of(run, found), {}, available, _process(run.model.mesh))
    said.check()
    names = list(dict.fromkeys(program.name for program in found))
    note(f"compiling {', '.join(names)}: once a start, maybe minutes")
    needed = dict.fromkeys(names, 0)
    for program in found:
        needed[program.name] = max(needed[program.name], beside(program, program.traced.lower().compile()))
    stays, saves = dict(said.stays), run.settings.checkpoint
    if "checkpoint" in stays and saves.every >= run.settings.steps and not saves.local_every:
        needed["checkpoint"] = stays.pop("checkpoint")  # the only one is written after the last step
    return dataclasses.replace(said, stays=stays, programs=needed, process=_process(run.model.mesh))


@shapes_for_arrays()
def stays_of(run: Run, found: list[Program]) -> dict[str, int]:
    """Bytes on each device of what lies there between programs."""
    s, mesh, state = run.settings, run.model.mesh, abstract_state(run)
    saved = state.saved()
    trained, moments = (sharding.local_bytes(one) for one in (saved.params, saved.opt_state))
    stays = {"parameters": trained, "optimizer": moments}
    if s.lora.rank:
        stays = {"frozen base": sharding.local_bytes(state.base), "adapters": trained, "optimizer": moments}
    if state.critic is not None:
        stays["critic"] = sharding.local_bytes((saved.critic, saved.critic_opt_state))
    # Pairs keep the log-probs of the reference; with adapters, the base itself is the reference.
    if "ref_logprobs" in s.objective.needs and s.objective.reads != "pairs" and not s.lora.rank:
        stays["reference"] = _reference(state, s.reference_dtype)
    scorer: Any = getattr(run.source, "scorer", None)
    if s.log.diagnostics_every and s.model.num_moe_layers and scorer is not None and not scorer.first_forward:
        stays["policy before"] = trained  # a step with routing diagnostics updates beside it
    if run.teacher is not None and (held := [one.shapes for one in run.teacher.parts if one.beside(mesh)]):
        stays["teacher"] = sharding.local_bytes(held)
    if (judge := run.reward_model()) is not None:
        stays["reward model"] = sharding.local_bytes(judge.shapes)
    rollout = next((program.traced.out_info for program in found if program.name == "rollout"), None)
    if s.rollout.lag and rollout is not None:
        arrays = jax.tree.leaves((rollout, rollout.tokens))  # tokens once more: the version of each
        stays["in flight"] = s.rollout.lag * sum(map(_bytes, arrays)) // sharding.shards("rows", mesh)
    if sharding.platform(mesh) == "cpu":
        stays["checkpoint"] = int(_WRITTEN * (trained + moments + stays.get("critic", 0)))
    return stays


def available_bytes(mesh: jax.sharding.Mesh) -> int | None:
    """Bytes that one device of the mesh may hold; CPU devices share what is free and what the process has."""
    device, sharing = _here(mesh)
    if device.platform == "cpu":
        return machine.free_memory_bytes() // sharing
    return (device.memory_stats() or {}).get("bytes_limit")


def spelled(count: int) -> str:
    """Bytes in three digits and a unit."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def beside(program: Program, compiled: jax.stages.Compiled) -> int:
    """Bytes of a compiled program that do not stay; outputs that reuse an argument's memory are counted once."""
    memory: Any = compiled.memory_analysis()
    code = memory.generated_code_size_in_bytes if sharding.platform(program.mesh) != "cpu" else 0  # of the process
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    stays = 0 if program.stays is None else sharding.local_bytes(program.stays)
    return max(arrays + memory.temp_size_in_bytes + code - stays, 0)


def _process(mesh: jax.sharding.Mesh) -> int:
    """Bytes of the process now, its programs among them, shared by its CPU devices; 0 on other devices."""
    device, sharing = _here(mesh)
    return machine.resident_bytes() // sharing if device.platform == "cpu" else 0


def _here(mesh: jax.sharding.Mesh) -> tuple[Any, int]:
    """A device of this process, and how many it has."""
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return (here or mesh.devices.flat)[0], max(len(here), 1)


def _reference(state: TrainState, dtype: str) -> int:
    size = jnp.dtype(dtype).itemsize
    shapes = jax.tree.leaves(state.trained.policy)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * size for x in shapes)


def _bytes(x: Any) -> int:
    return x.size * x.dtype.itemsize
