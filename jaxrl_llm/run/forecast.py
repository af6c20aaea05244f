"""Seconds of an evaluation and of a step before either has run once."""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import Model
from jaxrl_llm.run.assembly import Run
from jaxrl_llm.training.rollouts import Rollouts

_LEAST = 5e8  # FLOPs of a measurement
_READ = 512  # rows of the product that stands for prompts and whole answers


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Seconds of the phases of a run, without compiling."""

    evaluation: float
    rollout: float  # 0 where nothing is sampled
    update: float  # with the scores of pi_old and of the reference
    source: str = "by FLOPs and a matrix product"

    def as_fast_as(self, evaluation: float) -> "Forecast":
        """The forecast at the speed of an evaluation that took so many seconds; itself where none was timed."""
        if evaluation == self.evaluation:
            return self
        factor = evaluation / self.evaluation
        return Forecast(evaluation, factor * self.rollout, factor * self.update, "by FLOPs and the evaluation")

    def as_before(self, row: Mapping[str, Any]) -> "Forecast":
        """The forecast of a run that goes on, by the last row that it has."""
        rollout, update = row.get("time/rollout_s", 0.0), row.get("time/update_s", 0.0)
        return Forecast(self.evaluation, rollout, update, f"as step {row['step']} took")

    def line(self, step: int) -> str:
        """ "estimate: step 1 about 14 s (rollout 2 s), by FLOPs and the evaluation"."""
        whole = self.rollout + self.update
        about = f"about {_spelled(whole)}" if whole >= 1 else "less than 1 s"
        parts = f" (rollout {_spelled(self.rollout)})" if self.rollout >= 1 else ""
        return f"estimate: step {step} {about}{parts}, {self.source}"


def forecast(run: Run) -> Forecast:
    """The FLOPs of every phase over those a second of matrix products of the model's width, measured on one device.

    A token costs 2 FLOPs for each active parameter in a forward and 6 in an update; every answer counts as its bound.
    Attention, recomputation and what devices tell one another are left out.
    """
    s, samples, model = run.settings, isinstance(run.source, Rollouts), run.learner.model
    lengths = run.evaluator.prompts["lengths"]
    prompt, asked = int(np.median(lengths)), len(lengths)
    answers = asked * (s.evaluation.samples + 1)
    prompts = s.rollout.prompts if s.updates.layout == "shared" else s.rows
    walks = forwards(run) - samples + 3 * s.updates.epochs
    return Forecast(
        evaluation=sampling(model, asked * prompt, answers * s.answer_length, run.evaluator.slots or answers),
        rollout=samples
        * sampling(model, s.rollout.prompts * prompt, s.rows * s.answer_length, s.rollout.slots or s.rows),
        update=walks * _forward(model, prompts * prompt + s.rows * s.answer_length, _READ),
    )


def sampling(model: Model, prompts: int, answers: int, slots: int) -> float:
    """Seconds that it takes to read so many tokens of prompts and to sample so many of answers, in so many slots."""
    return _forward(model, prompts, _READ) + _forward(model, answers, slots)


def _forward(model: Model, tokens: int, rows: int) -> float:
    """Seconds of a forward over so many tokens, so many at a time."""
    config, devices = model.config, 1 if model.mesh is None else model.mesh.size
    speed = devices * _speed(min(rows, _READ), config.hidden_size, config.dtype)
    return 2.0 * config.active_parameters * tokens / speed


def forwards(run: Run) -> int:
    """How often a step reads its tokens beside the updates: to sample, and to score by the old policy and by pi_ref."""
    if not isinstance(run.source, Rollouts):
        return 0
    return 1 + (not run.source.scorer.first_forward) + ("ref_logprobs" in run.learner.objective.needs)


@functools.cache
def _speed(rows: int, width: int, dtype: str) -> float:
    """FLOPs a second of products [rows, width] [width, 4 width] and back on one device."""
    each = 16.0 * rows * width**2
    times = max(1, round(_LEAST / each))

    @jax.jit
    def products(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, x: (x @ up / width) @ down / width, x)

    given = [jnp.ones(shape, dtype) for shape in ((rows, width), (width, 4 * width), (4 * width, width))]
    products(*given).block_until_ready()  # compiled
    start = time.monotonic()
    products(*given).block_until_ready()
    return times * each / (time.monotonic() - start)


def _spelled(seconds: float) -> str:
    return f"{seconds:.1g} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
