"""The programs of a run, compiled for devices that need not be there: move, rollout, score and update.

They are the functions that training calls, lowered for abstract arrays with the shardings of a run.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import filled
from jaxrl_llm.plan import PROGRAMS
from jaxrl_llm.plan.chips import lowering_for
from jaxrl_llm.plan.cost import Cost, measure
from jaxrl_llm.plan.hlo import parse
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.run.assembly import Run, build
from jaxrl_llm.run.settings import Settings
from jaxrl_llm.training.layout import Groups, lay_out
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.state import TrainBatch, state_shardings


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a step's work."""

    name: str
    cost: Cost  # on one device
    tokens: int  # of all devices
    times: int  # that a step of training runs it, with answers at their bound
    passes: int  # in forwards: an update is 3, since a backward costs two; a move, which computes nothing, is 0


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


def compile_run(s: Settings, devices: Sequence[Any], only: Sequence[str] = ()) -> Iterator[Program]:
    """Compile the programs of the run for these devices, one after the other; with `only`, these names alone.

    `move` is there if rollouts have a mesh of their own, to which it brings the parameters. A rollout has two parts:
    the prompts (prefill) and one token of every slot (decode); with fewer slots than answers a step of training takes
    more of both. Score and update are those of one minibatch. Objectives
    on given data have the update alone.
    """
    run = build(s, devices)
    s, source = run.settings, run.source
    mesh: Any = run.model.mesh
    shapes = jax.eval_shape(run.state, run.model.shapes())
    state = _placed(shapes, state_shardings(run.model, shapes))
    width, rows = s.task.prompt_length, s.rows
    length = width + s.answer_length
    groups = Groups(s.rollout.group_size, s.answer_length, np.full(rows, width))
    # Of one minibatch, with answers at their bound.
    minibatches = s.updates.minibatches
    layout = lay_out(np.arange(rows // minibatches), np.full(rows, length), length, s.updates, groups)
    micro, trained = layout.index.shape[0], layout.index.size
    only = only or PROGRAMS

    def program(
        name: str, lower: Callable[[], jax.stages.Lowered], parts: Callable[[Cost, Cost], Any], on: Any = mesh
    ) -> Program:
        start = time.monotonic()
        with lowering_for(devices[0]):
            lowered = lower()
        compiled: Any = lowered.compile()
        seconds = time.monotonic() - start
        memory = compiled.memory_analysis()
        share = filled(ragged=sharding.platform(mesh) == "tpu") if mesh.shape["expert"] > 1 else 1.0
        return Program(
            name=name,
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            code=memory.generated_code_size_in_bytes,
            seconds=seconds,
            parts=tuple(parts(*measure(parse(compiled.as_text()), mesh.size, share))),
            mesh=on,
        )

    def update(batch: TrainBatch) -> Program:
        return program(
            "update",
            lambda: run.learner.lower_update(state, batch, layout),
            lambda once, turn: [Part("update", once + turn * micro, trained, minibatches * s.updates.epochs, 3)],
        )

    if not isinstance(source, Rollouts):
        if "update" in only:
            yield update(_abstract_given(run, rows, length, mesh))
        return
    engine = source.engine
    if not isinstance(engine, Engine):
        raise ValueError(f"rollout.engine={s.rollout.engine!r} samples on servers; to plan a run, set it to jax")
    slots = min(s.rollout.slots, rows) or rows
    chunk, chunks, steps = turns(s.rollout.prompts, s.rollout.group_size, slots, s.answer_length)
    with lowering_for(devices[0]):
        move = engine.lower_prepare(state.trained.policy) if "move" in only else None
        trajectory = engine.lower(state.trained.policy, s.rollout.prompts, width).out_info
    if move is not None:
        yield program("move", lambda: move, lambda once, turn: [Part("move", once + turn, 0, 1, 0)])
    if "rollout" in only:
        yield program(
            "rollout",
            lambda: engine.lower(state.trained.policy, s.rollout.prompts, width),
            lambda once, turn: [
                Part("prefill", once, chunk * width, chunks, 1),
                Part("decode", turn, slots, steps, 1),
            ],
            engine.model.mesh,
        )
    trajectory = trajectory.replace(rewards=jax.ShapeDtypeStruct((rows,), jnp.float32))
    if s.rollout.lag:
        trajectory = trajectory.replace(versions=trajectory.tokens)
    trajectory = _by_rows(trajectory, mesh)
    if "score" in only and not source.scorer.first_forward:
        yield program(
            "score",
            lambda: source.scorer.lower(state, trajectory, layout),
            lambda once, turn: [Part("score", once + turn * micro, trained, minibatches, 1)],
        )
    if "update" in only:
        reference = state.policy if "ref_logprobs" in source.scorer.learner.objective.needs else None
        scored = jax.eval_shape(lambda *args: source.scorer(*args).batch, state, reference, trajectory, [layout])
        yield update(_by_rows(scored, mesh))


def turns(prompts: int, group_size: int, slots: int, answer_length: int) -> tuple[int, int, int]:
    """Of a rollout with answers at their bound: prompts prefilled at once, how often, and decode steps. A slot takes
    one answer after the other, and the prompt gives the first token of each."""
    chunk = min(prompts, -(-slots // group_size))
    return chunk, -(-prompts // chunk), -(-prompts * group_size // slots) * (answer_length - 1)


def _abstract_given(run: Run, rows: int, length: int, mesh: Any) -> TrainBatch:
    """Pairs or given answers, by rows as they come from the host."""
    kinds: dict[str, Any] = dict(tokens=jnp.int32, segment_ids=jnp.int32, loss_mask=bool, advantages=jnp.float32)
    if "ref_logprobs" in run.learner.objective.needs:
        kinds["ref_logprobs"] = jnp.float32
    arrays = {name: jax.ShapeDtypeStruct((rows, length), kind) for name, kind in kinds.items()}
    return _by_rows(jax.eval_shape(TrainBatch, **arrays), mesh)


def _by_rows(shapes: Any, mesh: Any) -> Any:
    """Sharded by rows: the rollout leaves its arrays so, and what comes from the host is laid so."""
    return _placed(shapes, jax.tree.map(lambda x: sharding.rollout_sharding(x, mesh), shapes))


def _placed(shapes: Any, where: Any) -> Any:
    return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), shapes, where)
