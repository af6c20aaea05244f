"""A check of a run from its start to its table: the rows that need no model, the rehearsal, the rows of that."""

from collections.abc import Callable

import jax

from jaxrl_llm.ground import sharding
from jaxrl_llm.run import measured, posed
from jaxrl_llm.run.assembly import Run
from jaxrl_llm.run.findings import Finding
from jaxrl_llm.run.rehearsal import Rehearsal, rehearse


def checked(run: Run, note: Callable[[str], None]) -> tuple[list[Finding], str]:
    """The rows, and a few answers to read; a run that does not fit the memory is not rehearsed."""
    found = data_rows(run)
    refused = measured.refused_memory(run.memory())
    if refused is not None:
        return [*found, refused], ""
    rehearsal = rehearse(run, note)
    return [*found, *rehearsed_rows(run, rehearsal)], measured.shown_answers(run.settings, rehearsal.answers)


def data_rows(run: Run) -> list[Finding]:
    """What is asked, without a model."""
    task = run.settings.task
    examples = posed.examples(task)
    rows = [
        posed.template(task),
        posed.special_tokens(task, examples),
        posed.tokenizer_of(run, examples),
        posed.prompt_lengths(task, examples),
        *posed.doubts(run),
    ]
    return [row for row in rows if row is not None]


def rehearsed_rows(run: Run, r: Rehearsal) -> list[Finding]:
    """What two steps showed."""
    s = run.settings
    of_cpu = jax.local_device_count() if sharding.platform(run.model.mesh) == "cpu" else 0
    best = max((one["reward"] for one in r.answers), default=0.0)
    rows = [
        measured.reading(run, r),
        measured.ends(s, r),
        measured.rewards(s, r),
        posed.right_answers(s.task, posed.examples(s.task), best) if r.answers else None,
        measured.batch_shape(r),
        measured.update(s, r),
        measured.sampler(s, r),
        measured.routing(s, r),
        measured.memory(run.memory(), r, of_cpu),
        measured.time_ahead(s, r),
    ]
    return [row for row in rows if row is not None]
