"""The programs of a run, traced for arrays of its shapes: move, rollout, score, reward model, update and evaluation.

They are the functions that training calls, with the shardings of a run, so what is compiled of them is what it runs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import shapes_for_arrays
from jaxrl_llm.models import EXACT
from jaxrl_llm.models.lora import adapter_axes
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.run.assembly import Run
from jaxrl_llm.training.layout import Groups, lay_out
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.state import TrainState, state_shardings


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a program's work: so many times the code outside its loops of a run-time bound, so many turns of them.

    tokens: of all devices. times: that a step of training runs it, with answers at their bound. passes: in forwards; an
    update is 3, since a backward costs two, and a move, which computes nothing, is 0.
    """

    name: str
    outside: int
    turns: int
    tokens: int
    times: int
    passes: int


@dataclasses.dataclass(frozen=True)
class Program:
    """One program; stays: those of its arguments that lie on the devices between programs too."""

    name: str
    traced: jax.stages.Traced
    parts: tuple[Part, ...]
    mesh: Mesh
    stays: Any = None


@shapes_for_arrays()
def programs(run: Run, only: Sequence[str]) -> list[Program]:
    """Trace the named programs of a run, in the order in which training runs them.

    `move` is there if rollouts have a mesh of their own, to which it brings the parameters. A rollout has two parts:
    the prompts (prefill) and one token of every slot (decode); with fewer slots than answers a step of training takes
    more of both; servers that answer run none of these. Score and update are those of one minibatch with answers at
    their bound. Objectives on given data have no rollout and no score. `evaluation` reads the held-out prompts.
    """
    s, source, mesh = run.settings, run.source, run.model.mesh
    assert mesh is not None
    state, width, rows = abstract_state(run), s.task.prompt_length, s.rows
    length, found, params = s.task.row_length(s.answer_length), [], run.model.shapes()
    layout = lay_out(
        np.arange(rows // s.updates.minibatches),
        np.full(rows, length),
        length,
        s.updates,
        Groups(s.rollout.group_size, length - width, np.full(rows, width)),
    )
    micro, trained = layout.index.shape[0], layout.index.size
    held = None if s.lora.rank else params  # what a rollout of adapters reads was merged for it
    frozen = None if run.learner.divergence is None else run.teacher.shapes

    def update(batch: Rollout) -> Program:
        part = Part("update", 1, micro, trained, s.updates.minibatches * s.updates.epochs, 3)
        traced = run.learner.trace_update(state, batch, layout, frozen)
        return Program("update", traced, (part,), mesh, (state, frozen))

    if not isinstance(source, Rollouts):
        found += [update(_abstract_given(run, rows, length))] if "update" in only else []
    else:
        engine: Any = source.engine
        if engine.remote:
            sampled = engine.shapes(s.rollout.prompts, length - s.answer_length)
        else:
            slots = min(s.rollout.slots, rows) or rows
            chunk, chunks, steps = turns(s.rollout.prompts, s.rollout.group_size, slots, s.answer_length)
            prefill, decode = Part("prefill", 1, 0, chunk * width, chunks, 1), Part("decode", 0, 1, slots, steps, 1)
            moved = engine.trace_prepare(params)
            if moved is not None and "move" in only:
                found.append(Program("move", moved, (Part("move", 1, 1, 0, 1, 0),), mesh, held))
            traced: Any = source.traces(params, width)
            if "rollout" in only:
                stays, where = held if moved is None else None, engine.model.mesh or mesh
                found += [Program("rollout", one, (prefill, decode), where, stays) for one in traced]
            sampled = traced[-1].out_info
        sampled = sampled.replace(rewards=jax.ShapeDtypeStruct((rows,), jnp.float32))
        if s.rollout.lag:
            sampled = sampled.replace(versions=sampled.tokens)
        sampled = _by_rows(sampled, mesh)
        reference = state.policy if "ref_logprobs" in source.scorer.learner.objective.needs else None
        for policy, score in source.scorer.traces(state, reference, sampled, layout) if "score" in only else ():
            part = Part("score", 1, micro, trained, s.updates.minibatches, 1)
            found.append(Program("score", score, (part,), mesh, policy))
        asked = source.scorer.learner.objective.needs
        if run.teacher is not None and "teacher_logprobs" in asked and "score" in only:
            part = Part("score", 1, micro, trained, s.updates.minibatches, 1)
            for one in run.teacher.parts:
                if one.beside(mesh):
                    traced = one.trace(run.learner, sampled, layout)
                    found.append(Program("score", traced, (part,), one.model.mesh, one.shapes))
        judge = run.reward_model() if "reward model" in only else None
        if judge is not None:
            traced = judge.trace(sampled.tokens, s.updates)
            found.append(Program("reward model", traced, (), mesh, judge.shapes))
        if "update" in only:
            scored = jax.eval_shape(source.scorer.score, state, reference, sampled, [layout])
            if "teacher_logprobs" in asked:
                scored = scored.replace(teacher_logprobs=scored.old_logprobs)
            learned, _ = jax.eval_shape(source.scorer.experience, scored)
            found.append(update(_by_rows(learned, mesh)))
    if "evaluation" in only and not s.objective.learns_rewards:
        for router in dict.fromkeys((EXACT, s.rollout.router)):
            evaluator = dataclasses.replace(run.evaluator, router=router)
            stays = held if evaluator.engine.trace_prepare(params) is None else None
            where = evaluator.model.mesh or mesh
            found += [Program("evaluation", one, (), where, stays) for one in evaluator.traces(params)]
    return found


def abstract_state(run: Run) -> TrainState:
    """The shapes of a run's state with their shardings, the base under adapters among them."""
    s, shapes = run.settings, jax.eval_shape(run.blank)
    axes = adapter_axes(s.lora, run.model) if s.lora.rank else None
    state = _placed(shapes, state_shardings(run.model, shapes, axes))
    return state.replace(base=run.model.shapes()) if s.lora.rank else state


def turns(prompts: int, group_size: int, slots: int, answer_length: int) -> tuple[int, int, int]:
    """Prompts that a rollout with answers at their bound prefills at once, how often, and its decode steps.

    A slot takes one answer after the other, and the prompt gives the first token of each.
    """
    chunk = min(prompts, -(-slots // group_size))
    return chunk, -(-prompts // chunk), -(-prompts * group_size // slots) * (answer_length - 1)


def _abstract_given(run: Run, rows: int, length: int) -> Rollout:
    """Pairs or given answers, by rows as they come from the host."""
    kinds: dict[str, Any] = dict(tokens=jnp.int32, segment_ids=jnp.int32, loss_mask=bool, advantages=jnp.float32)
    if "ref_logprobs" in run.learner.objective.needs:
        kinds["ref_logprobs"] = jnp.float32
    arrays = {name: jax.ShapeDtypeStruct((rows, length), kind) for name, kind in kinds.items()}
    return _by_rows(jax.eval_shape(Rollout, **arrays), run.model.mesh)


def _by_rows(shapes: Any, mesh: Any) -> Any:
    """Sharded by rows: the rollout leaves its arrays so, and what comes from the host is laid so."""
    return _placed(shapes, jax.tree.map(lambda x: sharding.rollout_sharding(x, mesh), shapes))


def _placed(shapes: Any, where: Any) -> Any:
    return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), shapes, where)
