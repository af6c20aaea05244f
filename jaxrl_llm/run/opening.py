"""The lines at the start and the end of a run on the terminal: model, device, objective, DIR, and the next commands."""

import functools
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.terminal import one_line
from jaxrl_llm.models import Model
from jaxrl_llm.models.lora import init_adapters
from jaxrl_llm.records.run_log import read_json, read_rows
from jaxrl_llm.records.watch import PAGE
from jaxrl_llm.run.assembly import Run
from jaxrl_llm.run.best_so_far import ended_early
from jaxrl_llm.run.blocks import CheckpointConfig, EvaluationConfig
from jaxrl_llm.run.settings import Settings

_INDENT = f"\n{'':<11}"


def parameter_counts(model: Model) -> tuple[int, int]:
    """(all parameters, active parameters: of every layer's experts only the top k)."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    config, total, idle = model.config, 0, 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        total += leaf.size
        keys = jax.tree_util.keystr(path)
        if any(f"moe']['mlp']['{name}']" in keys for name in ("gate", "up", "down")):
            idle += leaf.size * (1 - config.num_experts_per_tok / config.num_experts)
    return total, round(total - idle)


def opening(run: Run, workdir: str | os.PathLike[str], memory: Sequence[str] = (), data: Sequence[str] = ()) -> str:
    """Model, device, memory, data, objective, updates and DIR, each in a line or two of at most 80 characters.

    memory: lines about what the run needs. data: lines about the task's data, where the objective has none of its own.
    """
    settings, model, sampler = run.settings, run.model, run.sampler
    total, active = parameter_counts(model)
    config, updates = settings.model, settings.updates
    size = f"{config.num_hidden_layers} layers, {_count(total)} parameters"
    if active < total:
        size += f", {_count(active)} active ({config.num_experts_per_tok} of {config.num_experts} experts)"
    device = jax.devices()[0]
    meshes = [f"mesh of {_mesh(model)}"] + [f"of rollouts {_mesh(sampler)}"] * (sampler != model)
    kind = device.platform if device.platform == device.device_kind else f"{device.platform} ({device.device_kind})"
    (first, *more), definitions = settings.objective.formula()
    n, batches = updates.updates_per_rollout, "rollouts" if settings.objective.reads == "rollouts" else "batches"
    rows = "" if updates.layout == "padded" else f", rows {updates.layout}"
    task, asked = settings.task, run.evaluator.prompts
    examples = [
        f"{one_line(p, 30)} -> {one_line(a, 34)}" for p, a in zip(asked["prompt"], asked["answer"], strict=True)
    ]
    lines: dict[str, Any] = {
        "task": _INDENT.join(textwrap.wrap(task.sentence, 69, break_long_words=False)),
        "such as": _INDENT.join(examples[:2]),
        "model": size,
        "trained": _adapters(settings, model),
        "device": _INDENT.join(folded([f"{kind}, {meshes[0]}", *meshes[1:]], "; ")),
        "not cut": _INDENT.join(folded(_not_cut(model, sampler), ", ")),
        "memory": _INDENT.join(memory),
        "data": _INDENT.join(textwrap.wrap(run.data, 69) or data),
        "objective": _INDENT.join(folded([f"{settings.objective_name}: max {first}", *more], " ")),
        "where": _INDENT.join(folded(definitions, "; ")),
        "rewards": _INDENT.join(folded(_rewards(settings), " + ")),
        "teacher": _INDENT.join(folded(_teacher(run), ", ")),
        "updates": f"{settings.steps} {batches} of {settings.rows} answers, N = {n} updates each{rows}",
        "evaluation": "" if settings.objective.learns_rewards else _evaluation(settings.evaluation),
        "DIR": os.fspath(workdir),
    }
    return "\n".join(f"{name:<10} {text}" for name, text in lines.items() if text)


def folded(pieces: Sequence[str], separator: str, width: int = 69) -> list[str]:
    """The joined pieces in lines of at most `width`; a line ends inside a piece only if that is longer, and inside no
    word, which may be a path."""
    lines = [""]
    for place, piece in enumerate(pieces):
        piece += separator if place + 1 < len(pieces) else ""
        if len(lines[-1] + piece.rstrip()) <= width:
            lines[-1] += piece
        else:
            *whole, last = textwrap.wrap(piece.rstrip(), width, break_long_words=False, break_on_hyphens=False)
            lines += [*whole, last + piece[len(piece.rstrip()) :]]
    return [line.rstrip() for line in lines if line]


def _mesh(model: Model) -> str:
    """The number of devices, and the axes over which they are spread."""
    mesh: Any = model.mesh
    shape = ", ".join(f"{name} {n}" for name, n in mesh.shape.items() if n > 1)
    return f"{mesh.size}: {shape}" if shape else "1"


def _not_cut(*models: Any) -> list[str]:
    """Dimensions of parameters that a mesh does not divide, so that more devices hold the whole of them."""
    return list(dict.fromkeys(one for m in models for one in sharding.undivided(m.axes(), m.shapes(), m.mesh)))


def _rewards(settings: Settings) -> list[str]:
    """The parts of the sum that rewards are, none where it is the verifier alone."""
    weights = settings.rewards.weights
    if weights == {"verifier": 1.0}:
        return []
    names = {"reward_model": f"reward_model ({settings.rewards.reward_model})"}
    return [f"{weight:g} {names.get(name, name)}" for name, weight in weights.items()]


def _teacher(run: Run) -> list[str]:
    """The path of the teacher and its size."""
    found = run.teacher
    if found is None:
        return []
    counts = [
        f"{_count(parameter_counts(one.model)[0])} parameters"
        + f" on a mesh of {_mesh(one.model)}" * (one.model.mesh != run.model.mesh)
        for one in found.parts
    ]
    return [found.path, *(counts or [found.place])]


def _evaluation(config: EvaluationConfig) -> str:
    """How held-out prompts are answered."""
    return f"{config.prompts} prompts, each a greedy answer and {config.samples} at {config.sampling}"


def _adapters(settings: Settings, model: Model) -> str:
    """How many parameters the adapters of LoRA have, "" without them."""
    lora = settings.lora
    if not lora.rank:
        return ""
    shapes = jax.eval_shape(functools.partial(init_adapters, lora, model), jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    return f"{_count(count)} parameters: LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {lora.targets}"


def closing(workdir: str | os.PathLike[str]) -> str:
    """The commands that look at a finished DIR, and the page for a reward that did not rise."""
    commands = f"python -m jaxrl_llm.report {workdir}", f"python -m jaxrl_llm.evaluation --workdir {workdir}"
    return "next: " + "\n      ".join([*commands, f"{PAGE} if the reward did not go up"])


def finished(workdir: str | os.PathLike[str], planned: int, checkpoint: CheckpointConfig) -> str:
    """Return what a DIR reached that has all its `planned` steps or ended early; "" for one that is not finished."""
    result, rows = read_json(Path(workdir) / "result.json"), read_rows(Path(workdir) / "metrics.jsonl")
    steps = max((row["step"] for row in rows), default=0)
    if result is None or (steps < planned and not ended_early(Path(workdir), checkpoint)):
        return ""
    names = {"eval/greedy": "held-out greedy", "eval/pass_at_1": "held-out sampled"}
    reached = ", ".join(f"{name} {result[key]:.3f}" for key, name in names.items() if result.get(key) is not None)
    ended = "is finished" if steps >= planned else "ended early"
    return f"{workdir} {ended}: {steps} rollouts" + (f", {reached}" if reached else "")


def _count(n: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)
