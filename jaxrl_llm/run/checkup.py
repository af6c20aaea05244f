"""A check of a run from its start to its table: the rows that need no model, the rehearsal, the rows of that."""

from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.ground import sharding
from jaxrl_llm.run import measured, posed
from jaxrl_llm.run.assembly import Run
from jaxrl_llm.run.findings import Finding
from jaxrl_llm.run.memory import Memory
from jaxrl_llm.run.rehearsal import Rehearsal, rehearse


def checked(run: Run, note: Callable[[str], None]) -> tuple[list[Finding], str]:
    """The rows, and a few answers to read; a run that does not fit the memory is not rehearsed."""
    examples, predicted = posed.examples_of(run), run.memory()
    found = data_rows(run, examples)
    refused = measured.refused_memory(predicted)
    if refused is not None:
        return [*found, refused], ""
    rehearsal = rehearse(run, note)
    rows = rehearsed_rows(run, rehearsal, examples, predicted)
    return [*found, *rows], measured.shown_answers(run.settings, rehearsal.answers)


def data_rows(run: Run, examples: posed.Examples) -> list[Finding]:
    """What is asked, without a model."""
    task = run.settings.task
    rows = [
        posed.template(task),
        posed.special_tokens(task, examples),
        posed.tokenizer_of(run, examples),
        posed.prompt_lengths(task, examples),
        *posed.doubts(run),
    ]
    return [row for row in rows if row is not None]


def rehearsed_rows(run: Run, r: Rehearsal, examples: posed.Examples, predicted: Memory) -> list[Finding]:
    """What two steps showed."""
    s = run.settings
    mesh: Any = run.model.mesh
    here = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    best = max((one["reward"] for one in r.answers), default=0.0)
    rows = [
        measured.reading(run, r),
        measured.ends(s, r),
        measured.rewards(s, r),
        posed.right_answers(s.task, examples, best) if r.answers else None,
        measured.batch_shape(r),
        measured.update(s, r),
        measured.sampler(s, r),
        measured.routing(s, r),
        measured.memory(predicted, r, here if sharding.platform(mesh) == "cpu" else 0),
        measured.time_ahead(s, r),
    ]
    return [row for row in rows if row is not None]
