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

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import SLACK
from jaxrl_llm.plan.cost import Cost, measure
from jaxrl_llm.plan.hlo import parse
from jaxrl_llm.rollout.trajectory import Trajectory
from jaxrl_llm.run import trainer
from jaxrl_llm.run.settings import Settings
from jaxrl_llm.training.layout import Groups, Layout, lay_out
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.state import TrainBatch, TrainState, make_state, state_shardings, with_value_head
from jaxrl_llm.training.step import Learner

__all__ = ["PROGRAMS", "Part", "Program", "compile_run"]

PROGRAMS = ("move", "rollout", "score", "update")


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a step's work, on one device. tokens: of all devices; passes: its cost in forward passes.

    A backward costs two forwards, so an update is 3 passes and everything else is 1.
    """

    name: str
    cost: Cost
    tokens: int
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

    @property
    def memory(self) -> int:
        """Bytes in use while it runs; outputs that reuse an argument's memory are counted once."""
        return self.arguments + self.outputs + self.temporaries + self.code


def compile_run(s: Settings, devices: Sequence[Any], only: Sequence[str] = ()) -> Iterator[Program]:
    """The programs of the run on these devices, one after the other; `only`: these names alone.

    Where rollouts have a mesh of their own, `move` brings the parameters there. A rollout has two parts, the prompts
    (prefill) and one token of every slot (decode); score and update are those of one minibatch. Objectives on given
    data have the update alone.
    """
    run = trainer.build(s, devices)
    source = run.source
    mesh: Any = run.model.mesh
    state = _abstract_state(run)
    width, rows = s.task.prompt_length, s.rows
    length = width + s.answer_length
    rows_of_one = s.rows // s.updates.minibatches
    groups = Groups(s.rollout.group_size, s.answer_length, np.full(s.rows, width))
    layout = lay_out(
        np.arange(rows_of_one), np.full(s.rows, length), length, s.updates, groups
    )  # of answers at their bound
    micro = layout.index.shape[0]
    trained = int(np.prod(layout.index.shape))

    def wanted(name: str) -> bool:
        return not only or name in only

    def program(name: str, lower: Callable[[], jax.stages.Lowered], parts: Callable[[Cost, Cost], Any]) -> Program:
        start = time.monotonic()
        compiled = lower().compile()
        seconds = time.monotonic() - start
        memory: Any = compiled.memory_analysis()
        text: Any = compiled.as_text()
        filled = 1 / SLACK if mesh.shape["expert"] > 1 else 1.0
        once, turn = measure(parse(text), mesh.size, filled)
        return Program(
            name=name,
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            code=memory.generated_code_size_in_bytes,
            seconds=seconds,
            parts=tuple(parts(once, turn)),
        )

    def update(batch: TrainBatch) -> Program:
        return program(
            "update",
            lambda: Learner.update.lower(run.learner, state, batch, layout),
            lambda once, turn: [Part("update", once + turn * micro, trained, 3)],
        )

    if not isinstance(source, Rollouts):
        if wanted("update"):
            yield update(_abstract_given(run, rows, length, mesh))
        return
    slots = min(s.rollout.slots, rows) or rows
    prefilled = min(s.rollout.prompts, -(-slots // s.rollout.group_size)) * width
    move = source.engine.lower_prepare(state.params) if wanted("move") else None
    if move is not None:
        yield program("move", lambda: move, lambda once, turn: [Part("move", once + turn, 0, 0)])
    if wanted("rollout"):
        yield program(
            "rollout",
            lambda: source.engine.lower(state.params, s.rollout.prompts, width),
            lambda once, turn: [Part("prefill", once, prefilled, 1), Part("decode", turn, slots, 1)],
        )
    trajectory = _abstract_trajectory(source, s, state, mesh)
    if wanted("score") and not source.scorer.first_forward:
        yield program(
            "score",
            lambda: source.scorer.lower(state, trajectory, layout),
            lambda once, turn: [Part("score", once + turn * micro, trained, 1)],
        )
    if wanted("update"):
        yield update(_abstract_batch(source, state, trajectory, layout, mesh))


def _abstract_state(run: trainer.Run) -> TrainState:
    """Shapes and shardings of the training state."""
    learner, model, kind = run.learner, run.model, run.settings.critic.kind

    def make(params: Any) -> TrainState:
        valued = with_value_head(params, model.config.hidden_size)
        if kind == "separate":
            return make_state(model, params, learner.optimizer, valued, learner.critic_optimizer)
        headed = kind == "head" or learner.objective.learns_rewards
        return make_state(model, valued if headed else params, learner.optimizer)

    shapes = jax.eval_shape(make, model.shapes())
    return _placed(shapes, state_shardings(model, shapes, learner.optimizer, learner.critic_optimizer))


def _abstract_given(run: trainer.Run, rows: int, length: int, mesh: Any) -> TrainBatch:
    """Pairs or given answers, by rows as they come from the host."""
    kinds: dict[str, Any] = {
        "tokens": jnp.int32,
        "segment_ids": jnp.int32,
        "loss_mask": bool,
        "advantages": jnp.float32,
    }
    if "ref_logprobs" in run.learner.objective.needs:
        kinds["ref_logprobs"] = jnp.float32
    arrays: Any = {name: jax.ShapeDtypeStruct((rows, length), kind) for name, kind in kinds.items()}
    return _by_rows(jax.eval_shape(lambda arrays: TrainBatch(**arrays), arrays), mesh)


def _abstract_trajectory(source: Rollouts, s: Settings, state: TrainState, mesh: Any) -> Trajectory:
    """A trajectory sharded by rows, as the rollout leaves it; rewards come from the host."""
    out = source.engine.lower(state.params, s.rollout.prompts, s.task.prompt_length).out_info
    out = out.replace(rewards=jax.ShapeDtypeStruct((s.rows,), jnp.float32))
    return _by_rows(out, mesh)


def _abstract_batch(
    source: Rollouts, state: TrainState, trajectory: Trajectory, layout: Layout, mesh: Any
) -> TrainBatch:
    """The scored batch of a rollout, sharded by rows."""
    needs = source.scorer.learner.objective.needs
    reference = state.params if "ref_logprobs" in needs else None
    shapes = jax.eval_shape(lambda *args: source.scorer(*args).batch, state, reference, trajectory, [layout])
    return _by_rows(shapes, mesh)


def _by_rows(shapes: Any, mesh: Any) -> Any:
    """Arrays of a rollout on the devices of their rows."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.rollout_sharding(x, mesh)), shapes
    )


def _placed(shapes: Any, where: Any) -> Any:
    return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), shapes, where)
