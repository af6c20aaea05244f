"""Two steps of a run by its own functions, and what they show: the measurements of `jaxrl-llm check`.

The first step compiles; what its batch, its scores and its first update say is looked at. The second is timed.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground import machine, processes
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.array_typing import Mask, PerToken, SegmentIds
from jaxrl_llm.models import Routing
from jaxrl_llm.objectives.batch import token_log_ratio
from jaxrl_llm.objectives.divergences import k3
from jaxrl_llm.run.assembly import Run
from jaxrl_llm.run.auto_layout import allowed
from jaxrl_llm.run.trainer import learn
from jaxrl_llm.training.collect import Draw, DynamicSampling
from jaxrl_llm.training.gaps import flips, gap
from jaxrl_llm.training.layout import UpdateConfig, epochs_of
from jaxrl_llm.training.replay import in_scoring
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.state import TrainState, settled


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """Results of two steps of a run; every number is on the host."""

    shapes: Mapping[str, Mapping[str, Any]]  # {another way to cut the batch: how far the log-probs are from the run's}
    sampler: Mapping[str, Any]  # how far the trainer's log-probs are from the sampler's; {} where nothing is sampled
    sampler_flips: Any  # share of experts that differ between sampler and trainer, by layer; None of a dense model
    row: Mapping[str, Any]  # the first step, as metrics.jsonl would have it
    answers: list[dict[str, Any]]  # {prompt, answer, reward, length, right, ended, verifier_error where there is one}
    teaching: bool  # whether any token has an advantage that is not 0, or a teacher's divergence
    prompt_nats: float  # -log p of a token of the prompts, on average
    seconds: Mapping[str, float]  # of the second step
    memory: int | None  # most bytes on one device; on a CPU by which the process grew; None where it is not known


def rehearse(run: Run, note: Callable[[str], None]) -> Rehearsal:
    """Start the run, which makes its warm start if the cache has none, and take two steps; no DIR is written.

    Dynamic sampling draws once, so that the answers are those of the prompts, and no step has routing diagnostics. A
    lag is left out: both steps learn from answers of their own policy.

    Raises:
      ValueError, FloatingPointError: as `train`, but for numbers that a row of the check is about.
    """
    before = machine.resident_bytes()
    quiet = dataclasses.replace(run.settings, log=dataclasses.replace(run.settings.log, diagnostics_every=0))
    run = dataclasses.replace(run, settings=quiet)
    state = run.start(note)
    run, state = run.started(state, None), settled(state)
    source = run.source
    s = run.settings
    if isinstance(source, Rollouts):
        source = dataclasses.replace(source.without_lag(), samples=s.rows, sampling=DynamicSampling())
    stream = source.stream()
    note("step 1")
    start = time.monotonic()
    drawn = source.next(stream, 1, state)
    golds = {
        asked: gold for batch, _ in drawn.asked for asked, gold in zip(batch["prompt"], batch["answer"], strict=True)
    }
    shown = _compared(run, state, drawn)
    batch = processes.fetch({"tokens": drawn.rollout.tokens, "mask": drawn.rollout.loss_mask})
    teaching = bool(processes.fetch(drawn.rollout.advantages)[batch["mask"]].any() or run.learner.divergence)
    state, pending = learn(run, state, drawn, 1, start)
    row = pending.row()
    del drawn
    note("step 2: it is timed")
    _forget_peak()
    start = time.monotonic()
    state, second = learn(run, state, source.next(stream, 2, state), 2, start)
    seconds = {"rollout": second.host.get("time/rollout_s", 0.0), "update": second.host["time/update_s"]}
    return Rehearsal(
        **shown,
        row=row,
        answers=_answers(pending.samples, batch, s.task.tokenizer.end_ids, golds),
        teaching=teaching,
        seconds=seconds,
        memory=_most(before),
    )


def _compared(run: Run, state: TrainState, drawn: Draw) -> dict[str, Any]:
    """The scores of the batch as the run cuts it, against those of other shapes and those of the sampler."""
    s, rollout = run.settings, drawn.rollout
    sampled = rollout.routes.sampled
    replayed = None if sampled is None else in_scoring(s.replay, sampled)
    held, masks = processes.fetch((rollout.segment_ids, rollout.loss_mask))

    wanted = {"logprobs", "routing"} | ({"chosen"} if replayed is not None else set())

    def score(updates: UpdateConfig, layouts: Any) -> dict[str, Any]:
        # All places are read: how many an answer has at most says nothing of a row that holds several.
        learner = dataclasses.replace(run.learner, rows=updates.layout, answer_tokens=0)
        return learner.score(state.policy, rollout, layouts, wanted, replayed)

    own = score(s.updates, drawn.epochs[0])
    logprobs, shapes = own["logprobs"], {}
    for name, updates in other_shapes(run).items():
        cut = epochs_of(
            held,
            masks,
            s.rollout.group_size,
            s.answer_length,
            updates,
            seed=s.seed,
            step=1,
            together=2 if s.objective.reads == "pairs" else 1,
        )
        other = score(updates, cut[0])["logprobs"]
        shapes[name] = M.finalize(processes.fetch(_apart(other, logprobs, rollout.loss_mask)))
    found: dict[str, Any] = {"shapes": shapes, "sampler": {}, "sampler_flips": None}
    if rollout.sampler_logprobs is not None:
        found["sampler"] = M.finalize(processes.fetch(_apart(logprobs, rollout.sampler_logprobs, rollout.loss_mask)))
    if sampled is not None and "routing" in own:
        by_layer = _flips(sampled, own["routing"], rollout.segment_ids)
        found["sampler_flips"] = M.finalize(processes.fetch(by_layer))["flips_by_layer"]
    cost = processes.fetch(_of_prompts(logprobs, rollout.segment_ids, rollout.loss_mask))
    return found | {"prompt_nats": M.finalize(cost)["nats"]}


def other_shapes(run: Run) -> dict[str, UpdateConfig]:
    """Other micro-batches and layouts that the config could ask for: fewer rows at a time, each other layout."""
    s = run.settings
    own = dataclasses.replace(s.updates, epochs=1, stop_at_kl=0.0)
    rows = s.rows // own.minibatches
    fewer = [n for n in range(1, own.micro_batch_rows or rows) if rows % n == 0]
    named = {f"{n} row{'s' * (n > 1)} at a time": dataclasses.replace(own, micro_batch_rows=n) for n in fewer}
    mesh = run.model.mesh
    found = dict([next(((name, one) for name, one in named.items() if allowed(s, one, mesh)), ("", own))])
    for layout in ("padded", "packed", "shared"):
        shuffle = "groups" if layout == "shared" else own.shuffle
        found[layout] = dataclasses.replace(own, layout=layout, shuffle=shuffle)
    return {name: one for name, one in found.items() if name not in ("", own.layout) and allowed(s, one, mesh)}


@jax.jit
def _apart(logprobs: PerToken, other: PerToken, mask: Mask) -> dict[str, M.Metric]:
    """|log p - log q| of the answers on average, at most, and above 1e-2; and the k3 of p / q."""
    size = jnp.abs(logprobs - other)
    return {
        **{f"gap_{what}": value for what, value in gap(size, mask).items()},
        "gap_max": M.Maximum.of(size, mask),
        "gap_k3": M.Mean.of(k3(token_log_ratio(logprobs, other, mask)), mask),
    }


@jax.jit
def _flips(old: Routing, current: Routing, segment_ids: SegmentIds) -> dict[str, M.Metric]:
    return flips("flips", old, current, segment_ids)


@jax.jit
def _of_prompts(logprobs: PerToken, segment_ids: SegmentIds, mask: Mask) -> dict[str, M.Metric]:
    """-log p of the tokens that stand before an answer and were scored: a row's first was not, nor a shared prompt's
    other copies."""
    return {"nats": M.Mean.of(-logprobs, (segment_ids != 0) & ~mask & (logprobs != 0))}


def _answers(
    samples: list[dict[str, Any]], batch: Mapping[str, np.ndarray], end_ids: tuple[int, ...], golds: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The answers that a person can read, in the order of the batch, with the right one and whether they ended."""
    rows = []
    for sample, tokens, mask in zip(samples, batch["tokens"], batch["mask"], strict=False):
        ended = bool(mask.any()) and int(tokens[mask][-1]) in end_ids
        rows.append(sample | {"right": golds[sample["prompt"]], "ended": ended})
    return rows


def _most(before: int) -> int | None:
    """The most bytes in use on one of this process's devices; on a CPU by how much the process has grown."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    if peaks:
        return max(peaks)
    return max(machine.resident_bytes("VmHWM") - before, 0) if before else None


def _forget_peak() -> None:
    """Let the peak of the resident memory begin anew, so that compilations are not in it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
