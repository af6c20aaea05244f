"""What a run will need of each device's memory, by arithmetic from its settings, before anything large is made.

    needed = what stays + the largest of the temporaries of a rollout, of an update, of an evaluation and of the
             supervised training before them

On a CPU, where one memory holds everything, the process is counted too: what it holds when this is asked, and what
compiled programs leave behind. What stays (parameters, the optimizer's moments, the reference, a critic) is exact. Of
the temporaries, those that grow with the model and the batch are counted: weights in the rollout's dtype (and those
that adapters are merged into), the cache and the logits of the slots; gradients, activations, the logits of a chunk of
tokens. What the compiler adds or saves is not included; `python -m jaxrl_llm.plan` is exact.
"""

import dataclasses
import math
import textwrap
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxrl_llm.ground import machine, sharding
from jaxrl_llm.models import (
    Model,
    ModelConfig,
    choose_attention,
    in_a_loop,
    kept_probabilities,
    score_chunk,
    skips_blocks,
)
from jaxrl_llm.models.lora import adapter_axes
from jaxrl_llm.run.settings import Settings
from jaxrl_llm.training.state import TrainState, state_shardings
from jaxrl_llm.training.step import Learner

_PROGRAMS = 2**28  # bytes that compiled programs and their tracing leave, measured
_WRITTEN = 1.3  # copies of the state while Orbax writes it: one, and what is encoded of it; measured
_EVALUATED = 2**31  # bytes of cache that answers of an evaluation may take on each device


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device: what stays through the run, and the temporaries of its phases, one after the other."""

    stays: Mapping[str, int]
    rollout: Mapping[str, int]  # empty where the objective learns from given data
    update: Mapping[str, int]
    available: int | None  # of one device, None where it is not known
    evaluation: Mapping[str, int] = dataclasses.field(default_factory=dict)
    process: int = 0  # on a CPU, what is no array: the interpreter, libraries, programs
    start: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of supervised training that is yet to be done

    @property
    def phases(self) -> Mapping[str, Mapping[str, int]]:
        """Those that the run has, by name."""
        phases = {
            "rollout": self.rollout,
            "update": self.update,
            "evaluation": self.evaluation,
            "warm start": self.start,
        }
        return {name: phase for name, phase in phases.items() if phase}

    @property
    def temporaries(self) -> Mapping[str, int]:
        """Those of the phase that has most."""
        return max(self.phases.values(), key=lambda phase: sum(phase.values()))

    @property
    def arrays(self) -> int:
        return sum(self.stays.values()) + sum(self.temporaries.values())

    @property
    def total(self) -> int:
        return self.arrays + self.process

    def lines(self) -> list[str]:
        """All of it, of the temporaries the cache and the largest by name, of a warm start only where it decides; lines
        of at most 69 characters."""
        has = "" if self.available is None else f" of {spelled(self.available)}"
        parts = [f"process {spelled(self.process)}"] if self.process else []
        parts += [f"{name} {spelled(size)}" for name, size in self.stays.items()]
        for name, phase in self.phases.items():
            if phase is self.start and phase is not self.temporaries:
                continue
            shown = dict.fromkeys(part for part in ("cache", _largest(phase)) if part in phase)
            sizes = ", ".join(f"{part} {spelled(phase[part])}" for part in shown)
            parts.append(f"{name} {spelled(sum(phase.values()))} ({sizes})")
        return textwrap.wrap(f"{spelled(self.total)}{has} a device: {', '.join(parts)}", 69)

    def check(self) -> None:
        """Raises ValueError when a device has less memory than the run needs."""
        if self.available is None or self.total <= self.available:
            return
        stay = sum(self.stays.values()) + self.process > self.available
        largest = _largest(self.temporaries)
        if self.temporaries is self.start and largest in ("activations", "logits"):
            largest = "batch"
        remedy = _REMEDIES["parameters" if stay else largest]
        raise ValueError(
            f"the run needs {spelled(self.total)} on each device, which has {spelled(self.available)} "
            f"({' '.join(self.lines())}); {remedy}"
        )


_REMEDIES = {
    "parameters": "spread them over more devices with mesh.shape, or set model.param_dtype=bfloat16",
    "merged": "spread the model over more devices with mesh.shape, or adapt fewer matrices with lora.targets",
    "weights": "spread them over more devices with mesh.shape (or rollout.mesh_shape), or set rollout.dtype=bfloat16",
    "cache": "lower rollout.slots or rollout.max_new_tokens, or set rollout.dtype=bfloat16",
    "logits": "lower rollout.slots or updates.micro_batch_rows",
    "batch": "lower warm_start.batch_size",
    "moments": "spread the model over more devices with mesh.shape, or set warm_start.steps=0",
    "gradients": "spread the model over more devices with mesh.shape",
    "activations": "lower updates.micro_batch_rows, or set model.remat=block",
    "records": "lower rollout.prompts, or rollout.top_k where it cuts",
}


def needed(
    s: Settings, learner: Learner, sampler: Model, state: TrainState, reward_model: int = 0, *, start: bool = False
) -> Memory:
    """What a run of these settings needs.

    Args:
      sampler: the model on the mesh of rollouts.
      reward_model: its bytes.
      start: whether the supervised training is yet to be done.
    """
    mesh: Any = learner.model.mesh
    axes = adapter_axes(s.lora, learner.model) if s.lora.rank else None
    saved, where = state.saved(), state_shardings(learner.model, state, axes).saved()
    trained, moments = _local(saved.params, where.params), _local(saved.opt_state, where.opt_state)
    parameters, stays, merged = trained, {"parameters": trained, "optimizer": moments}, 0
    if s.lora.rank:
        base: Any = learner.model.shapes()
        parameters = sharding.local_bytes(base)
        leaves: dict[Any, Any] = flatten_dict(base)
        merged = sharding.local_bytes([x for path, x in leaves.items() if s.lora.holds(path)])
        stays = {"frozen base": parameters, "adapters": trained, "optimizer": moments}
    if state.critic is not None:
        stays["critic"] = _local(saved.critic, where.critic) + _local(saved.critic_opt_state, where.critic_opt_state)
    # Of pairs the log-probs of the reference are kept; with adapters, the base itself is the reference.
    if "ref_logprobs" in s.objective.needs and s.objective.reads != "pairs" and not s.lora.rank:
        stays["reference"] = parameters
    if reward_model:
        stays["reward model"] = reward_model
    if s.rollout.lag:
        stays["in flight"] = s.rollout.lag * _of_trajectory(s) // sharding.shards("rows", mesh)
    rollout = _of_rollout(s, sampler, merged) if s.objective.reads == "rollouts" else {}
    update = _of_update(s, trained, mesh)
    if _here(mesh)[0].platform == "cpu":  # what a checkpoint is written from, while updates overwrite the state
        stays["checkpoint"] = int(_WRITTEN * (trained + moments + stays.get("critic", 0)))
        # The heap keeps the layers' weights in pieces, between which an update does not fit but that copy does.
        update |= {"weights": max(rollout.get("weights", 0) - stays["checkpoint"], 0)}
    evaluation = {} if s.objective.learns_rewards else _of_evaluation(s, sampler, merged)
    before = _of_start(s, learner.model) if start else {}
    return Memory(stays, rollout, update, of_device(mesh), evaluation, _of_process(mesh), before)


def of_device(mesh: jax.sharding.Mesh) -> int | None:
    """Bytes that one device of the mesh may hold; CPU devices share what is free and what the process has."""
    device, sharing = _here(mesh)
    if device.platform == "cpu":
        return machine.free_memory_bytes() // sharing
    return (device.memory_stats() or {}).get("bytes_limit")


def _of_process(mesh: jax.sharding.Mesh) -> int:
    """What the process holds now and what its programs will, shared by its CPU devices; 0 on other devices."""
    device, sharing = _here(mesh)
    return (machine.resident_bytes() + _PROGRAMS) // sharing if device.platform == "cpu" else 0


def _here(mesh: jax.sharding.Mesh) -> tuple[Any, int]:
    """A device of this process, and how many it has."""
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return (here or mesh.devices.flat)[0], max(len(here), 1)


def _of_rollout(s: Settings, sampler: Model, merged: int) -> dict[str, int]:
    """What the answers of a step take, and the record of them."""
    slots = min(s.rollout.slots, s.rows) or s.rows
    shape = s.rollout.prompts, s.rollout.group_size, slots
    records = s.rows * s.answer_length * (s.model.num_moe_layers * s.model.num_experts_per_tok + _kept(s))
    return {"merged": merged, **_of_answers(s, sampler, s.rollout.dtype, *shape), "records": records}


def _of_evaluation(s: Settings, sampler: Model, merged: int) -> dict[str, int]:
    """What the answers to the held-out prompts take, a greedy one to each beside the samples."""
    asked = s.evaluation.prompts, s.evaluation.samples
    shape = asked[0], asked[1] + 1, evaluated_at_once(s, sampler, *asked)
    return {"merged": merged, **_of_answers(s, sampler, s.model.dtype, *shape)}


def evaluated_at_once(s: Settings, sampler: Model, prompts: int, samples: int) -> int:
    """Answers that an evaluation decodes at once: rollout.slots; where that is 0 all whose cache is small, else those
    whose cache is, or as many as a rollout has if those are more."""
    rows = prompts * (samples + 1)
    if s.rollout.slots:
        return min(s.rollout.slots, rows)
    # In turns no slot shares its prompt with others.
    whole, in_turns = (
        _of_answers(s, sampler, s.model.dtype, prompts, samples + 1, slots)["cache"] for slots in (rows, rows - 1)
    )
    return rows if whole <= _EVALUATED else min(rows, max(s.rows, rows * _EVALUATED // in_turns))


def _of_answers(s: Settings, sampler: Model, dtype: str, prompts: int, group: int, slots: int) -> dict[str, int]:
    """All weights cut into layers and cast; the cache of every slot, prompt included; one step's logits.

    On a mesh of its own the weights are what the parameters of training are moved into, before the program starts;
    otherwise the program makes them.
    """
    config, width = s.model, s.task.prompt_length
    shards, tensor = (sharding.shards(axis, sampler.mesh) for axis in ("rows", "heads"))
    # In float8 they are rounded, not stored.
    size = jnp.dtype(config.dtype if dtype == "float8_e4m3" else dtype).itemsize
    column = 2 * len(config.kinds) * _over(config.num_key_value_heads, tensor) * config.head_dim * size
    if slots == prompts * group:  # a group shares its prompt
        columns = -(-prompts // shards) * width + -(-slots // shards) * (s.answer_length - 1)
    else:
        chunk = -(-slots // group)
        columns = -(-slots // shards) * (width + s.answer_length - 1) + -(-chunk // shards) * width
    return {
        "weights": sharding.local_bytes(sampler.shapes()) * size // jnp.dtype(config.param_dtype).itemsize,
        "cache": columns * column,
        # The logits, their weights and the noise that one of them is drawn with.
        "logits": 3 * 4 * -(-slots // shards) * _over(config.vocab_size, tensor),
    }


def _kept(s: Settings) -> int:
    """Bytes a token of what the sampler's cuts left."""
    return 4 * min(s.rollout.top_k, s.model.vocab_size) if s.rollout.records_kept else 0


def _of_trajectory(s: Settings) -> int:
    """Of the answers: ids, segments, log-probs and versions of 4 bytes, the mask, what was kept, what was routed."""
    routed = s.model.num_moe_layers * s.model.num_experts_per_tok
    if s.replay.mode == "R3" and s.replay.what == "logits":
        routed += 4 * s.model.num_moe_layers * s.model.num_experts
    return s.rows * (s.task.prompt_length + s.answer_length) * (17 + routed + _kept(s))


def _of_update(s: Settings, parameters: int, mesh: Any) -> dict[str, int]:
    """Gradients (and their sum over micro-batches), what the backward pass keeps, a chunk's logits."""
    # Devices with tokens of their own, those of them that share a row, and those that share a head.
    shards, context, tensor = (sharding.shards(axis, mesh) for axis in ("rows", "time", "heads"))
    platform = sharding.platform(mesh)
    config, answers = s.model, s.rollout.group_size if s.updates.layout == "shared" else 1
    length = s.task.prompt_length + answers * s.answer_length
    minibatch = s.rows // s.updates.minibatches
    micro = min(s.updates.micro_batch_rows, minibatch) or minibatch
    rows = -(-micro // answers // (shards // context))
    record = 2 * config.num_moe_layers * config.num_experts_per_tok + _kept(s)  # scored and replayed
    whole_rows = answers == 1 or not skips_blocks(length, mesh)
    return {
        "gradients": parameters * (1 if micro == minibatch else 2),
        "activations": _activations(config, rows, length, context, tensor, mesh, parameters, whole_rows),
        "logits": _logits(rows * length, rows * answers * s.answer_length, _over(config.vocab_size, tensor), platform),
        # Of the rollout, and on several devices once more of the minibatch, whose rows were sent to their devices.
        "records": (s.rows + (minibatch if shards > 1 else 0)) // shards * length * record,
    }


def _of_start(s: Settings, model: Model) -> dict[str, int]:
    """Supervised training of all parameters; the moments of a run that trains them all too are made after its own."""
    mesh: Any = model.mesh
    shards, context, tensor = (sharding.shards(axis, mesh) for axis in ("rows", "time", "heads"))
    platform, parameters = sharding.platform(mesh), sharding.local_bytes(model.shapes())
    rows, length = -(-s.warm_start.batch_size // (shards // context)), s.task.prompt_length + s.task.answer_length
    return {
        "moments": 2 * parameters if s.lora.rank else 0,
        "gradients": parameters,
        "activations": _activations(s.model, rows, length, context, tensor, mesh, parameters),
        "logits": _logits(rows * length, rows * length, _over(s.model.vocab_size, tensor), platform),
    }


def _logits(tokens: int, scored: int, vocabulary: int, platform: str) -> int:
    """Those of a chunk and their gradient, and the probabilities that the scored tokens leave for the backward."""
    chunk = 2 * 4 * min(tokens, score_chunk(platform)) * vocabulary
    return chunk + kept_probabilities(scored, vocabulary, platform)


def _activations(
    config: ModelConfig,
    rows: int,
    length: int,
    context: int,
    tensor: int,
    mesh: Any,
    parameters: int,
    whole_rows: bool = True,
) -> int:
    """What the forward leaves for the backward: every layer's intermediates, or with remat what each layer starts from
    (and, of `dots`, its products and what flash attention gave) and those of one layer; beside that the gradients of
    one layer's intermediates. parameters: bytes of what is trained. On a CPU it is at least these, since the
    optimizer's changes are arrays of their own in the same place; elsewhere they are fused with what they change.
    whole_rows: scores of attention are arrays of whole rows.

    How often a width is kept beside the products was read off XLA's programs for CPUs, which keep about half of all
    bfloat16 in float32.
    """
    platform, size = sharding.platform(mesh), config.compute_dtype.itemsize
    if platform == "cpu":
        size = (size + 4) // 2
    d, tokens = config.hidden_size, rows * -(-length // context)
    heads = _over(config.num_attention_heads, tensor) * config.head_dim
    keys = 2 * _over(config.num_key_value_heads, tensor) * config.head_dim
    products, whole, kept, attention = 0, 0, 0, choose_attention(config, platform)
    for kind in config.kinds:
        chosen = config.num_experts_per_tok if kind == "moe" else 1
        width = _over(chosen * config.moe_intermediate_size if kind == "moe" else config.intermediate_size, tensor)
        matmuls = tokens * size * (heads + keys + (1 + chosen) * d + 2 * width)
        products += matmuls + tokens * size * heads * (attention == "flash")  # whose result remat keeps, too
        # Norms' inputs and outputs, what the experts are given; what is rotated and lies by heads; the gated product.
        every = matmuls + tokens * size * ((5 + chosen) * d + 4 * heads + 2 * keys + 2 * width)
        whole += every
        # A loop stacks what autodiff asks for, keys and values by blocks of queries, and not what is computed again.
        # XLA:GPU keeps as little of layers one by one.
        stacked = kind == "dense" and (platform != "cpu" or in_a_loop(config, mesh, len(config.kinds)))
        kept += tokens * size * (5 * d + 2 * heads + 5 * keys // 2 + 2 * width) if stacked else every
    layers = len(config.kinds)
    starts, one = layers * tokens * d * size, whole // layers
    if whole_rows and attention == "plain":  # a quarter of the queries at a time, never kept
        one += 3 * 4 * tokens * _over(config.num_attention_heads, tensor) * length // 4
    needed = {"none": kept, "block": starts + one, "dots": starts + products + one}[config.remat] + one
    return max(needed, parameters) if platform == "cpu" else needed


def _local(tree: Any, where: Any) -> int:
    """Bytes of the part that one device holds."""
    parts = jax.tree.map(lambda x, to: math.prod(to.shard_shape(x.shape)) * x.dtype.itemsize, tree, where)
    return sum(jax.tree.leaves(parts))


def _largest(phase: Mapping[str, int]) -> str:
    return max(phase, key=lambda name: phase[name])


def _over(size: int, parts: int) -> int:
    """The size of a dimension on one device; a dimension that does not divide is not split."""
    return size // parts if size % parts == 0 else size


def spelled(count: int) -> str:
    """Bytes in three digits and a unit."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
