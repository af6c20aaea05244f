"""The checkpoints of one run: written when they are due, and resumed from with everything that a resume needs."""

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

import jax

from jaxrl_llm.ground import processes, sharding
from jaxrl_llm.ground.phases import phase
from jaxrl_llm.ground.signals import Stopped
from jaxrl_llm.records.checkpointing import Checkpoints, steps_of
from jaxrl_llm.records.places import root_of
from jaxrl_llm.records.run_log import RunLog
from jaxrl_llm.run.assembly import Run, base_digest, check_base
from jaxrl_llm.run.best_so_far import Best
from jaxrl_llm.training.state import TrainState, settled


class Saves:
    """The checkpoints of a run in its DIR or PLACE, and the nearer and more frequent ones in DIR/local.

    Args:
      identity: hash of the config, which a checkpoint must have been written by.

    Attributes:
      best: the best evaluation so far, whose checkpoint stays.
    """

    def __init__(self, run: Run, log: RunLog, identity: str):
        self._settings, self._log, self._identity = run.settings, log, identity
        near = log.workdir / "local" / str(jax.process_index())
        has_near = run.settings.checkpoint.local_every or processes.everywhere(bool(steps_of(near)))
        self._near = Checkpoints(near, of_process=True) if has_near else None
        self._checkpoints = Checkpoints(log.workdir, run.settings.checkpoint.keep, self._near)
        self._root = root_of(log.workdir)
        self._due = False  # a checkpoint, which waits while the one before is slow to be written
        self.best = Best(run.settings.checkpoint)

    def start(self, run: Run) -> tuple[Run, TrainState, Any, int]:
        """Return the run that has what its source keeps of the start, its state, its stream and the step of both.

        The step is that of the newest intact checkpoint, 0 without any; the logs are cut back to it.

        Raises:
          ValueError: the checkpoint belongs to another run.
        """
        with phase("start"):
            state = run.start(self._log.note)
        run = run.started(state, self._root / "reference")
        stream, self._base = run.source.stream(), base_digest(state)
        if self._checkpoints.latest is None:
            self._log.cut(-1)
            return run, settled(state), stream, 0
        state = state.shapes()  # so that the start does not stay beside what is restored
        mesh: Any = run.model.mesh
        by_rows = functools.partial(sharding.rollout_sharding, mesh=mesh)
        first, saved, extra = self._checkpoints.restore(state.saved(), note=self._log.note, in_flight=by_rows)
        if extra["config_hash"] != self._identity:
            raise ValueError(f"{self._log.workdir} holds the checkpoint of another config; use another --workdir")
        check_base(self._base, extra)
        state = state.restored(saved)
        del saved  # `settled` may copy it
        self.best = Best.resumed(self._settings.checkpoint, extra.get("best"))
        self._checkpoints.set_aside(after=first)
        run.source.resume(stream, extra["stream"], extra["in_flight"])
        self._log.note(f"resumed from step {first}")
        self._log.cut(first)
        return run, settled(state), stream, first

    def judged(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of a step's evaluation with what they make of the best."""
        self.best = self.best.after(step, metrics)
        return {**metrics, **self.best.row()}

    def due(self, step: int, *, ends: bool) -> Checkpoints | None:
        """Return the checkpoints that this step belongs into, None if it is not saved. A collective."""
        config = self._settings.checkpoint
        self._due = self._due or step % config.every == 0
        if ends or step == self.best.step or (self._due and self._checkpoints.ready()):
            self._due = False
            return self._checkpoints
        near = config.local_every and step % config.local_every == 0
        return self._near if near and self._near is not None and self._near.ready() else None

    def write(self, into: Checkpoints, step: int, state: TrainState, run: Run, stream: Any) -> None:
        """Save the state of a step and the place of its stream, in the background."""
        extra = {"config_hash": self._identity, "base": self._base, "stream": stream.get_state()}
        extra |= {"day": self._settings.task.day} if self._settings.task.day else {}
        extra |= {"best": self.best.saved()} if self._settings.checkpoint.best else {}
        into.save(step, state.saved(), extra, run.source.in_flight(stream), self.best.step)

    def stopped(self, step: int, signal: int) -> NoReturn:
        """Raises Stopped once the checkpoint of the step is whole."""
        self.close()
        raise Stopped(f"stopped after step {step}, saved in {self._root}", signal, saved=True)

    def close(self) -> None:
        self._checkpoints.close()
