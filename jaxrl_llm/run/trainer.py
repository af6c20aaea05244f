"""The training loop, read from top to bottom: draw a batch, update N times, log, evaluate, checkpoint."""

import dataclasses
import itertools
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground import processes
from jaxrl_llm.ground.signals import Stopped, interruptible
from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.records.run_log import RunLog
from jaxrl_llm.run.assembly import Run, base_digest, check_base
from jaxrl_llm.run.opening import closing, opening
from jaxrl_llm.training.experience import diagnose
from jaxrl_llm.training.optimizer import make_schedule
from jaxrl_llm.training.pending import Pending
from jaxrl_llm.training.sources import Drawn
from jaxrl_llm.training.state import TrainState


def train(run: Run, log: RunLog, config_hash: str) -> dict[str, Any]:
    """Train to `settings.steps`, from the newest checkpoint of the DIR if there is one; returns the last evaluation.

    A damaged checkpoint is named and set aside, and the one before it is used.

    Raises:
      FloatingPointError: a loss or gradient is not finite; the message has the step.
      ValueError: a run-time check failed, or the checkpoint belongs to another run.
      OSError: a checkpoint or a log could not be written; the checkpoints before it stay.
      Stopped: Ctrl-C, SIGTERM or the end of the terminal, after the current step and its checkpoint.
    """
    began, settings = time.monotonic(), run.settings
    log.note(opening(run, log.workdir))
    log.warn(run.warnings)
    checkpoints = Checkpoints(log.workdir, settings.checkpoint.keep)
    state = run.start(log.note)
    run = run.started(state, log.workdir / "reference")
    stream, first, base = run.source.stream(), 0, base_digest(state)
    if checkpoints.latest is not None:
        first, saved, extra = checkpoints.restore(state.saved(), note=log.note)
        state = state.restored(saved)
        if extra["config_hash"] != config_hash:
            raise ValueError(f"{log.workdir} holds the checkpoint of another config; use another --workdir")
        check_base(base, extra)
        checkpoints.set_aside(after=first)
        stream.set_state(extra["stream"])
        log.note(f"resumed from step {first}")
    log.cut(first if checkpoints.latest is not None else -1)
    if first < settings.steps:  # nothing is printed until these are there
        programs = "rollout, scores and update" if settings.objective.reads == "rollouts" else "update"
        log.note(f"compiling {programs} for step {first + 1}: once a start, a minute or more for a large model")
    late: Pending | None = None
    evaluated: dict[str, Any] = {}
    if first >= settings.steps > 0:  # complete before it began
        evaluated = evaluate(run, state)[0]
    if first == 0:
        evaluated, rows = evaluate(run, state)
        log.samples(0, rows)
        log.metrics(0, evaluated)
    with interruptible() as interrupted:
        for step in range(first + 1, settings.steps + 1):
            state, current = take_step(run, state, stream, step)
            if step == first + 1:
                current.host["time/to_first_update_s"] = time.monotonic() - began
            if late is not None:
                late.write(log)
            late = current
            last = step == settings.steps
            if last or step % settings.evaluation.every == 0:
                evaluated, rows = evaluate(run, state)
                log.samples(step, rows)
                late.host |= evaluated
            stop = processes.largest(interrupted())
            if last or stop or step % settings.checkpoint.every == 0:
                late.write(log)
                late = None
                extra = {"config_hash": config_hash, "base": base, "stream": stream.get_state()}
                checkpoints.save(step, state.saved(), extra)
            if stop and not last:
                checkpoints.close()
                raise Stopped(f"stopped after step {step}", stop, saved=True)
        checkpoints.close()
    log.screen.end(closing(log.workdir))
    return evaluated


def take_step(run: Run, state: TrainState, stream: Any, step: int) -> tuple[TrainState, Pending]:
    """One batch of the source and the N updates that learn from it: the state after them, and the row of the step."""
    start = time.monotonic()
    return learn(run, state, run.source.next(stream, step, state), step, start)


def learn(run: Run, state: TrainState, drawn: Drawn, step: int, start: float) -> tuple[TrainState, Pending]:
    """The updates of `take_step` on a batch that is there; start: when its step began, on the monotonic clock."""
    s = run.settings
    every, n = s.log.diagnostics_every, s.updates.updates_per_rollout
    diagnosed = bool(every) and step % every == 0 and drawn.batch.routing.scored is not None
    old = state.policy.copy() if diagnosed else None
    learner = dataclasses.replace(run.learner, policy_frozen=step <= s.critic.warmup_steps)
    updates = []
    for layout in itertools.chain.from_iterable(drawn.epochs):
        state, metrics = learner.update(state, drawn.batch, layout)
        updates.append(metrics)
        if s.updates.stop_at_kl and _drift(metrics) > s.updates.stop_at_kl:
            break
    scored = drawn.metrics
    if old is not None:
        scored = scored | diagnose(run.learner, state.policy, old, drawn.batch, drawn.epochs[0])
    jax.block_until_ready(state.updates)
    taken, done = {}, n * step
    if s.updates.stop_at_kl:
        taken, done = {"update/taken": len(updates)}, int(np.asarray(state.updates))
    host = drawn.host | {
        **taken,
        # of the last update
        "optimizer/learning_rate": float(np.asarray(make_schedule(s.optimizer, n * s.steps)(done - 1))),
        "time/update_s": time.monotonic() - start - drawn.host.get("time/rollout_s", 0.0),
    }
    bounds = {
        "dtype": s.model.dtype,
        "sampler_dtype": s.sampler_precision,
        "truncated": s.rollout.allow_truncated,
        "answers": s.rows,
    }
    return state, Pending(step, host, scored, updates, drawn.samples, bounds)


def _drift(update: Mapping[str, M.Metric]) -> float:
    """kl/old of an update's own forward over its minibatch, before its step; waits for the update."""
    drift: Any = M.finalize(processes.fetch({"kl/old": update["kl/old"]}))
    return drift["kl/old"]


def evaluate(run: Run, state: TrainState) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What held-out data say of a state, and answers to read: the source's own, and pass rates of a policy."""
    metrics, rows = run.source.evaluate(state)
    if not run.settings.objective.learns_rewards:
        rates, answers = run.pass_rates(state)
        metrics, rows = metrics | rates, rows + answers[: run.settings.log.samples]
    return metrics, [row | {"split": "test"} for row in rows]
