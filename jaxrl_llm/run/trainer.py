"""The training loop, read from top to bottom: draw a batch, update N times, log, evaluate, checkpoint."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground import processes
from jaxrl_llm.ground.phases import phase
from jaxrl_llm.ground.signals import interruptible
from jaxrl_llm.records.run_log import RunLog, read_rows
from jaxrl_llm.run.assembly import Run
from jaxrl_llm.run.clock import Clock, speed
from jaxrl_llm.run.forecast import forwards
from jaxrl_llm.run.opening import closing
from jaxrl_llm.run.reports import Reports
from jaxrl_llm.run.saves import Saves
from jaxrl_llm.training.collect import Draw
from jaxrl_llm.training.experience import diagnose
from jaxrl_llm.training.optimizer import make_schedule
from jaxrl_llm.training.pending import Pending, moved_by_a_flip
from jaxrl_llm.training.state import TrainState


def train(run: Run, log: RunLog, config_hash: str) -> dict[str, Any]:
    """Train to `settings.steps`, from the newest checkpoint of the DIR if there is one; returns the last evaluation.

    A patience with `checkpoint.best` may end the run before, which a resume does not train on.
    A damaged checkpoint is named and set aside, and the one before it is used.

    Raises:
      FloatingPointError: a loss or gradient is not finite; the message has the step.
      ValueError: a run-time check failed, or the checkpoint belongs to another run.
      OSError: a checkpoint or a log could not be written; the checkpoints before it stay.
      Stopped: Ctrl-C, SIGTERM, the end of the terminal or notice of JAX's service, after the step and its checkpoint.
    """
    began, settings = time.time(), run.settings
    saves = Saves(run, log, config_hash)
    log.screen.begin()
    run, state, stream, first = saves.start(run)
    last_row = read_rows(log.workdir / "metrics.jsonl")[-1:] if first else []
    clock = Clock(log.workdir, settings.log.profile, last_row[0] if last_row else None, began)
    report = Reports(run, log, clock, first + 1)
    evaluated, end = {}, first if saves.best.ends else settings.steps
    if first == 0:
        with clock.spends("evaluations"):
            evaluated, rows = evaluate(run, state)
        report.evaluation(0, evaluated, rows)
    elif first >= end:  # complete before it began
        evaluated = evaluate(run, state)[0] | saves.best.row()
    if first < end:
        report.estimate(last_row[0] if last_row else None)
    with (
        contextlib.closing(clock),
        interruptible(lambda: f"finishing step {clock.at} and saving; again ends now") as heard,
    ):
        for step in range(first + 1, end + 1):
            with clock.step(step), phase(f"step {step}"):
                state, row = take_step(run, state, stream, step)
                report.step(row)
            last = step == end
            if last or step % settings.evaluation.every == 0:
                with clock.spends("evaluations"):
                    evaluated, rows = evaluate(run, state)
                evaluated = saves.judged(step, evaluated)
                report.evaluation(step, evaluated, rows)
                last = last or saves.best.ends
            stop = processes.agreed_stop(heard(), step - first)
            with clock.spends("saving"), phase("saving"):
                if into := saves.due(step, ends=bool(last or stop)):
                    report.flush()
                    saves.write(into, step, state, run, stream)
            if stop and not last:
                saves.stopped(step, stop)
            if last:
                break
        saves.close()
    if saves.best.ends:
        log.note(f"ended early: {saves.best}")
    log.screen.end(closing(log.workdir))
    return evaluated | saves.best.result()


def take_step(run: Run, state: TrainState, stream: Any, step: int) -> tuple[TrainState, Pending]:
    """One batch of the source and the N updates that learn from it: the state after them, and the row of the step."""
    start = time.monotonic()
    return learn(run, state, run.source.next(stream, step, state), step, start)


def learn(run: Run, state: TrainState, drawn: Draw, step: int, start: float) -> tuple[TrainState, Pending]:
    """The updates of `take_step` on a batch that is there; start: when its step began, on the monotonic clock."""
    s = run.settings
    every, n = s.log.diagnostics_every, s.updates.updates_per_rollout
    diagnosed = bool(every) and step % every == 0 and drawn.rollout.routes.scored is not None
    old = state.policy.copy() if diagnosed else None
    learner = dataclasses.replace(run.learner, policy_frozen=step <= s.critic.warmup_steps)
    updates, scored = [], drawn.metrics
    frozen = None if learner.divergence is None else run.teacher.params
    with phase("updates"):
        for layout in itertools.chain.from_iterable(drawn.epochs):
            state, metrics = learner.update(state, drawn.rollout, layout, frozen)
            updates.append(metrics)
            if s.updates.stop_at_kl and _drift(metrics) > s.updates.stop_at_kl:
                break
        if old is not None:
            scored = scored | diagnose(run.learner, state.policy, old, drawn.rollout, drawn.epochs[0])
        jax.block_until_ready(state.updates)
    taken, done = {}, n * step
    if s.updates.stop_at_kl:
        taken, done = {"update/taken": len(updates)}, int(np.asarray(state.updates))
    seconds = time.monotonic() - start
    host = drawn.host | {
        **taken,
        **speed(drawn.epochs, run.settings.model.active_parameters, forwards(run), seconds, run.model.mesh),
        # of the last update
        "optimizer/learning_rate": float(np.asarray(make_schedule(s.optimizer, n * s.steps)(done - 1))),
        "time/update_s": seconds - drawn.host.get("time/rollout_s", 0.0),
    }
    bounds = {
        "dtype": s.model.dtype,
        "sampler_dtype": s.sampler_precision,
        "truncated": s.rollout.allow_truncated,
        "flipped": moved_by_a_flip(s.rows, s.rollout.group_size, s.model.num_experts),
        "exact": run.model.first_difference if s.model.numerics == "exact" else None,
    }
    return state, Pending(step, host, scored, updates, drawn.samples, bounds)


def _drift(update: Mapping[str, M.Metric]) -> float:
    """kl/old of an update's own forward over its minibatch, before its step; waits for the update."""
    drift: Any = M.finalize(processes.fetch({"kl/old": update["kl/old"]}))
    return drift["kl/old"]


def evaluate(run: Run, state: TrainState) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return held-out metrics of a state, and answers to read: the source's own, and pass rates of a policy."""
    metrics, rows = run.source.evaluate(state)
    if not run.settings.objective.learns_rewards:
        rates, answers = run.pass_rates(state)
        metrics, rows = metrics | rates, rows + answers[: run.settings.log.samples]
    return metrics, [row | {"split": "test"} for row in rows]
