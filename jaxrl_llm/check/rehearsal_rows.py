"""Rows of a check about what a rehearsal showed: numbers of the model, answers and rewards, memory, time."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.check.data_rows import Examples, right_answers
from jaxrl_llm.check.findings import LOOK, OK, STOP, Finding
from jaxrl_llm.check.fits import Fits, spelled
from jaxrl_llm.check.rehearsal import Rehearsal
from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.terminal import one_line
from jaxrl_llm.records.watch import MOVED
from jaxrl_llm.run.assembly import Run
from jaxrl_llm.run.blocks import Settings
from jaxrl_llm.tasks import UNKNOWN
from jaxrl_llm.training.pending import disagreement, moved_by_a_flip

_FAR = 0.2  # nats on average: ten times what rounding to bfloat16 makes
_SHOWN = 3  # answers


def rows(run: Run, r: Rehearsal, examples: Examples, predicted: Fits) -> list[Finding]:
    """The rows about what two steps showed."""
    s = run.settings
    mesh: Any = run.model.mesh
    here = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    best = max((one["reward"] for one in r.answers), default=0.0)
    found = [
        reading(run, r),
        ends(s, r),
        rewards(s, r),
        right_answers(s.task, examples, best) if r.answers else None,
        batch_shape(r),
        update(s, r),
        sampler(s, r),
        routing(s, r),
        memory(predicted, r, here if sharding.platform(mesh) == "cpu" else 0),
        time_ahead(s, r),
    ]
    return [row for row in found if row is not None]


def batch_shape(r: Rehearsal) -> Finding | None:
    """Change of the trainer's own log-probs with the shape of a micro-batch; None where there is one shape."""
    if not r.shapes:
        return None
    each = [f"{name} {gap['gap_mean']:.1e} (max {gap['gap_max']:.1e})" for name, gap in r.shapes.items()]
    seen = f"|delta log p| in nats against the run's own shape: {', '.join(each)}"
    worst = max(r.shapes, key=lambda name: r.shapes[name]["gap_mean"])
    if not disagreement(r.shapes[worst], "gap", "float32", 1.0):
        return Finding("batch shape", seen)
    remedy = (
        "compare only runs of equal updates.micro_batch_rows and updates.layout; for less, model.dtype=float32 or "
        "JAX_DEFAULT_MATMUL_PRECISION=highest"
    )
    far = r.shapes[worst]["gap_mean"] > _FAR
    return Finding("batch shape", seen, STOP if far else LOOK, f"{worst} computes something else" if far else remedy)


def update(s: Settings, r: Rehearsal) -> Finding:
    """The first update: it is finite, and its forward agrees with the scores of pi_old."""
    seen = f"loss {r.row['loss/total']:.3g}, gradient norm {r.row['grad/norm']:.3g}"
    if r.row.get("update/not_finite", 0) > 0:
        return Finding("update", seen, STOP, "lower optimizer.learning_rate or set optimizer.clip_norm")
    name = "check/current_old"
    if f"{name}_mean" in r.row:
        seen += f"; its log-probs against the scores of pi_old: mean |delta| {r.row[f'{name}_mean']:.1e} nats"
    if found := disagreement(r.row, name, s.model.dtype):
        return Finding("update", f"{seen}: {found}", STOP, "the run would end at step 1; try model.remat=none")
    moved = r.row["update/moved"]
    if moved < MOVED:
        seen += f"; it moves {moved:.1%} of the parameters (update/moved), {s.model.param_dtype} rounds the rest back"
        wider = "set model.param_dtype=float32, or " if s.model.param_dtype != "float32" else ""
        return Finding("update", seen, LOOK, f"{wider}raise optimizer.learning_rate")
    if math.isnan(moved) and s.model.param_dtype != "float32":
        seen += f"; without a gradient it does not show how much of an update {s.model.param_dtype} parameters keep"
        return Finding("update", seen, LOOK, "set model.param_dtype=float32")
    return Finding("update", seen)


def sampler(s: Settings, r: Rehearsal) -> Finding | None:
    """The rollout engine against the trainer; None where nothing is sampled."""
    if not r.sampler:
        return None
    gap = r.sampler
    seen = (
        f"to trainer: mean |delta log p| {gap['gap_mean']:.1e} nats, k3 {gap['gap_k3']:.1e}, "
        f"{gap['gap_share']:.1%} of tokens above 1e-2"
    )
    flipped = moved_by_a_flip(s.rows, s.rollout.group_size, s.model.num_experts)
    if not disagreement(gap, "gap", "float32", flipped=flipped):
        return Finding("sampler", seen)
    exact = s.model.dtype == s.sampler_precision == "float32" and not s.rollout.allow_truncated
    if exact:
        return Finding("sampler", seen, STOP, "two float32 passes must agree: the run would end at step 1")
    if gap["gap_mean"] > _FAR:
        return Finding("sampler", seen, STOP, "rounding does not explain this; try rollout.dtype=float32")
    if s.sampler_precision == "made different":
        return Finding("sampler", seen, LOOK, "rollout.router_* ask for this; leave them out if you do not study it")
    types = f"model.dtype={s.model.dtype} and rollout.dtype={s.rollout.dtype}"
    remedy = f"expected of {types}: correct for it (objective.correction), or set both to float32"
    return Finding("sampler", seen, LOOK, remedy)


def routing(s: Settings, r: Rehearsal) -> Finding | None:
    """Experts that differ between sampler and trainer, by layer, and what replay does about it; None if dense."""
    if r.sampler_flips is None:
        return None
    layers = np.atleast_1d(r.sampler_flips)
    shown = " ".join(f"{share:.2%}" for share in layers[:8]) + (" ..." if len(layers) > 8 else "")
    seen = f"experts that differ, sampler to trainer, by layer: {shown}"
    numeric = r.row.get("routing/flips_numeric")
    seen += "" if numeric is None else f"; score to update {numeric:.2%}"
    mode = s.replay.mode
    replays = {"off": "nothing is replayed", "R2": "R2 replays the score's", "R3": "R3 replays the sampler's"}[mode]
    seen += f"; {replays}"
    if lost := r.row.get("check/unrecorded", 0):
        return Finding("routing", f"{seen}; {lost:.0f} records are missing", STOP, "the run would end at step 1")
    if layers.max() > 1e-2 and mode != "R3":
        return Finding("routing", seen, LOOK, "replay.mode=R3 replays the sampler's experts")
    return Finding("routing", seen)


def reading(run: Run, r: Rehearsal) -> Finding | None:
    """Cost of the prompts under a published model, and answers that its tokenizer cannot spell."""
    s = run.settings
    chance, unknown = math.log(s.model.vocab_size), [UNKNOWN in one["answer"] for one in r.answers]
    texts = [f"a token of the prompts costs {r.prompt_nats:.2f} nats (by chance {chance:.2f})"] if s.pretrained else []
    texts += [f"{sum(unknown)} of {len(unknown)} answers hold ids without text or half characters"] if unknown else []
    if not texts:
        return None
    seen = "; ".join(texts)
    remedy = "the model has not read such tokens: look whether tokenizer, template and checkpoint belong together"
    if unknown and np.mean(unknown) > 0.5:
        return Finding("texts", seen, STOP, remedy)
    strange = s.pretrained and not s.warm_start.steps and not r.prompt_nats < chance  # a warm start unlearns prompts
    if strange or (s.pretrained and any(unknown)):
        return Finding("texts", seen, LOOK, remedy)
    return Finding("texts", seen)


def ends(s: Settings, r: Rehearsal) -> Finding | None:
    """Answers that end by themselves, and their lengths; None where nothing is sampled."""
    if not r.answers:
        return None
    ended, lengths = [one["ended"] for one in r.answers], [one["length"] for one in r.answers]
    seen = (
        f"{sum(ended)} of {len(ended)} end by themselves; {np.mean(lengths):.1f} tokens on average, longest "
        f"{max(lengths)}, bound {s.answer_length}"
    )
    longer = "raise rollout.max_new_tokens, or look whether the tokenizer's end is the one that the model writes"
    if not any(ended) and not s.task.verify_truncated:
        return Finding("answers", seen, STOP, f"an answer that is cut off gets 0: {longer}")
    return Finding("answers", seen, LOOK if np.mean(ended) < 0.5 else OK, longer if np.mean(ended) < 0.5 else "")


def rewards(s: Settings, r: Rehearsal) -> Finding | None:
    """The verifier's rewards of the sampled answers; None where nothing is sampled."""
    if not r.answers:
        return None
    given = np.array([one["reward"] for one in r.answers])
    failed = [one["verifier_error"] for one in r.answers if "verifier_error" in one]
    groups = r.row["reward/zero_advantage_groups"]
    seen = f"mean {given.mean():.3g}, from {given.min():.3g} to {given.max():.3g}, of {len(given)} answers; "
    seen += f"{groups:.0%} of groups have equal ones"
    if failed:
        seen += f"; the verifier failed on {len(failed)}, the first: {failed[0]:.80}"
        remedy = "correct the verifier: an answer on which it fails gets 0"
        return Finding("rewards", seen, STOP if len(failed) == len(given) else LOOK, remedy)
    if r.teaching:
        return Finding("rewards", seen)
    harder = "an easier task, a warm start or a larger rollout.max_new_tokens"
    easier = "a harder task or a verifier that tells answers apart"
    remedy = f"no advantage: nothing is learned; read the answers below, then take {easier if given.max() else harder}"
    return Finding("rewards", seen, LOOK, remedy)


def memory(predicted: Fits, r: Rehearsal, of_cpu: int) -> Finding:
    """The need of the compiled programs against what was in use; of_cpu: devices that share a CPU."""
    expected, available = predicted.arrays * (of_cpu or 1), (predicted.available or 0) * (of_cpu or 1)
    of = f" of {spelled(available)}" if available else ""
    seen = f"predicted {spelled(expected)}{of}{'' if of_cpu else ' a device'}"
    if r.memory is None:
        return Finding("memory", f"{seen}; what was in use is not known here")
    seen += f", the process grew by {spelled(r.memory)}" if of_cpu else f", in use {spelled(r.memory)}"
    if available and r.memory > 0.9 * available:
        remedy = "lower updates.micro_batch_rows or rollout.slots: longer answers need more"
        return Finding("memory", seen, LOOK, remedy)
    return Finding("memory", seen)


def time_ahead(s: Settings, r: Rehearsal) -> Finding:
    """Steps and hours: a rollout with the draws that dynamic sampling will need, the updates, evaluations."""
    rollout, update = r.seconds["rollout"], r.seconds["update"]
    draws = 1.0
    if s.dynamic_sampling.max_draws > 1:
        useful = 1 - r.row["reward/zero_advantage_groups"]
        draws = min(s.dynamic_sampling.max_draws, 1 / max(useful, 1e-9))
    if not rollout:  # of given data, whose evaluation is another one
        return Finding("time ahead", f"{s.steps} steps of {update:.3g} s: about {duration(s.steps * update)}")
    evaluations = 2 + (s.steps - 1) // s.evaluation.every
    answers = s.evaluation.prompts * (s.evaluation.samples + 1)
    total = s.steps * (draws * rollout + update) + evaluations * rollout * answers / s.rows
    seen = f"{s.steps} steps of {draws * rollout + update:.3g} s (rollout {rollout:.3g}"
    seen += f" x {draws:.1f} draws" if draws > 1 else ""
    seen += f", the rest {update:.3g}) and {evaluations} evaluations: about {duration(total)}"
    return Finding("time ahead", seen)


def duration(seconds: float) -> str:
    """Return seconds as seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def shown_answers(s: Settings, answers: Sequence[dict[str, Any]]) -> str:
    """One answer to each of the first prompts, and one on which the verifier failed, with its reasons."""
    blocks = []
    failed = [one for one in answers if "verifier_error" in one]
    for one in [*answers[:: s.rollout.group_size][:_SHOWN], *failed[:1]]:
        fields = {"prompt": one["prompt"], "answer": one["answer"], "right": one["right"]}
        lines = [f"{name:<9}{one_line(text, 70)}" for name, text in fields.items()]
        blocks.append("\n".join([*lines, f"{'reward':<9}{one['reward']:g}: {one_line(_reason(s, one), 70)}"]))
    return "\n\n".join(blocks)


def _reason(s: Settings, one: dict[str, Any]) -> str:
    """The reason for the reward of an answer, as far as it is known."""
    if "verifier_error" in one:
        return f"the verifier failed ({one['verifier_error']})"
    if UNKNOWN in one["answer"]:
        return "not verified, as it holds ids without text or half characters"
    if not one["ended"] and not s.task.verify_truncated:
        return f"not verified, as it is cut off at {s.answer_length} tokens"
    return "right" if one["reward"] >= s.task.solved else "not right"
