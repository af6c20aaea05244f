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
from jaxrl_llm.ground.signals import Stopped, interruptible
from jaxrl_llm.records.checkpointing import Checkpoints, steps_of
from jaxrl_llm.records.places import root_of
from jaxrl_llm.records.run_log import RunLog, read_rows
from jaxrl_llm.run.assembly import Run, base_digest, check_base
from jaxrl_llm.run.observed import Observed, speed
from jaxrl_llm.run.opening import closing, opening
from jaxrl_llm.training.experience import diagnose
from jaxrl_llm.training.optimizer import make_schedule
from jaxrl_llm.training.pending import Pending, moved_by_a_flip
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.sources import Drawn
from jaxrl_llm.training.state import TrainState, settled


def train(run: Run, log: RunLog, config_hash: str) -> dict[str, Any]:
    """Train to `settings.steps`, from the newest checkpoint of the DIR if there is one; returns the last evaluation.

    A damaged checkpoint is named and set aside, and the one before it is used.

    Raises:
      FloatingPointError: a loss or gradient is not finite; the message has the step.
      ValueError: a run-time check failed, or the checkpoint belongs to another run.
      OSError: a checkpoint or a log could not be written; the checkpoints before it stay.
      Stopped: Ctrl-C, SIGTERM, the end of the terminal or notice of JAX's service, after the step and its checkpoint.
    """
    began, settings = time.time(), run.settings
    log.note(opening(run, log.workdir))
    log.warn(run.warnings)
    local_every, local = settings.checkpoint.local_every, log.workdir / "local" / str(jax.process_index())
    has_near = local_every or processes.everywhere(bool(steps_of(local)))
    near = Checkpoints(local, of_process=True) if has_near else None
    checkpoints = Checkpoints(log.workdir, settings.checkpoint.keep, near)
    state = run.start(log.note)
    run = run.started(state, root_of(log.workdir) / "reference")
    stream, first, base = run.source.stream(), 0, base_digest(state)
    if checkpoints.latest is not None:
        state = state.shapes()  # so that the start does not stay beside what is restored
        ahead = run.source.in_flight_like(state)
        first, saved, extra = checkpoints.restore(state.saved(), note=log.note, in_flight=ahead)
        state = state.restored(saved)
        del saved
        if extra["config_hash"] != config_hash:
            raise ValueError(f"{log.workdir} holds the checkpoint of another config; use another --workdir")
        check_base(base, extra)
        checkpoints.set_aside(after=first)
        run.source.resume(stream, extra["stream"], extra.get("in_flight", ()))
        log.note(f"resumed from step {first}")
    state = settled(state)
    log.cut(first if checkpoints.latest is not None else -1)
    rows = read_rows(log.workdir / "metrics.jsonl") if first else []
    observed = Observed(log.workdir, settings.log.profile, rows[-1] if rows else None, began)
    if first < settings.steps:  # nothing is printed until these are there
        programs = "rollout, scores and update" if settings.objective.reads == "rollouts" else "update"
        log.note(f"compiling {programs} for step {first + 1}: once a start, a minute or more for a large model")
    late: Pending | None = None
    evaluated: dict[str, Any] = {}
    due = False  # a checkpoint, which waits while the one before is slow to be written
    if first >= settings.steps > 0:  # complete before it began
        evaluated = evaluate(run, state)[0]
    if first == 0:
        with observed.spends("evaluations"):
            evaluated, rows = evaluate(run, state)
        log.samples(0, rows)
        log.metrics(0, evaluated)
    with contextlib.closing(observed), interruptible() as interrupted:
        for step in range(first + 1, settings.steps + 1):
            with observed.step(step):
                state, current = take_step(run, state, stream, step)
                if late is not None:
                    late.write(log)
            if step == first + 1:
                current.host["time/to_first_update_s"] = time.time() - began
            current.host |= observed.row(current.host)
            late = current
            last = step == settings.steps
            if last or step % settings.evaluation.every == 0:
                with observed.spends("evaluations"):
                    evaluated, rows = evaluate(run, state)
                log.samples(step, rows)
                late.host |= evaluated
            stop = processes.agreed_stop(interrupted(), step - first)
            due = due or step % settings.checkpoint.every == 0
            with observed.spends("saving"):
                whole = bool(last or stop or (due and checkpoints.ready()))
                if whole or (near is not None and local_every and step % local_every == 0 and near.ready()):
                    late.write(log)
                    late, due = None, due and not whole
                    extra = {"config_hash": config_hash, "base": base, "stream": stream.get_state()}
                    where = checkpoints if whole or near is None else near
                    where.save(step, state.saved(), extra, run.source.in_flight(stream))
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
    seconds = time.monotonic() - start
    host = drawn.host | {
        **taken,
        **speed(drawn.epochs, run.settings.model.active_parameters, _forwards(run), seconds, run.model.mesh),
        # of the last update
        "optimizer/learning_rate": float(np.asarray(make_schedule(s.optimizer, n * s.steps)(done - 1))),
        "time/update_s": seconds - drawn.host.get("time/rollout_s", 0.0),
    }
    bounds = {
        "dtype": s.model.dtype,
        "sampler_dtype": s.sampler_precision,
        "truncated": s.rollout.allow_truncated,
        "flipped": moved_by_a_flip(s.rows, s.rollout.group_size, s.model.num_experts),
    }
    return state, Pending(step, host, scored, updates, drawn.samples, bounds)


def _forwards(run: Run) -> int:
    """How often a step reads its tokens beside the updates: to sample, and to score by the old policy and by pi_ref."""
    if not isinstance(run.source, Rollouts):
        return 0
    return 1 + (not run.source.scorer.first_forward) + ("ref_logprobs" in run.learner.objective.needs)


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
