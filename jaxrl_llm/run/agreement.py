"""Checks that two blocks of a configuration agree; each message names the fields, their values and what to change."""

import math
from collections.abc import Iterator, Sequence

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models import EXACT, Model
from jaxrl_llm.models.lora import adapter_axes
from jaxrl_llm.run.best_so_far import evaluated_keys
from jaxrl_llm.run.blocks import Settings, TeacherConfig, unserved

_OVER_TURNS = ByName({"faults_of_episodes": "jaxrl_llm.run.episode_settings"})
_TEACHERS = ByName({"faults_of_teachers": "jaxrl_llm.run.teacher_settings"})


def check_agreement(s: Settings) -> None:
    """Raises ValueError where two blocks contradict each other."""
    for faults in _FAULTS:
        for fault in faults(s):
            raise ValueError(fault)
    if s.lora.rank:
        adapter_axes(s.lora, Model(s.model))  # raises if the model has no such matrix
    s.model.check_length(s.task.row_length(max(s.answer_length, s.task.answer_length)))


def _of_data(s: Settings) -> Iterator[str]:
    """Refuse what an objective on pairs or on given answers has no use for, and check what it asks of the others."""
    reads, name = s.objective.reads, s.objective_name
    if reads == "rollouts":
        return
    needed = {
        "rollout.engine": (s.rollout.engine, "jax"),
        "rollout.group_size": (s.rollout.group_size, 2 if reads == "pairs" else 1),
        "rollout.temperature": (s.rollout.temperature, 1.0),
        "rollout.top_k": (s.rollout.top_k, 0),
        "rollout.top_p": (s.rollout.top_p, 1.0),
        "rollout.min_p": (s.rollout.min_p, 0.0),
        "rollout.dtype": (s.rollout.dtype, "float32"),
        "rollout.lag": (s.rollout.lag, 0),
        "dynamic_sampling.max_draws": (s.dynamic_sampling.max_draws, 1),
        "rewards.verifier_weight": (s.rewards.verifier_weight, 1.0),
        "rewards.functions": (s.rewards.functions, ()),
        "rewards.reward_model": (s.rewards.reward_model, ""),
        "rewards.length_weight": (s.rewards.length_weight, 0.0),
        "rewards.overlong_cache": (s.rewards.overlong_cache, 0),
        "rewards.missing_eos_penalty": (s.rewards.missing_eos_penalty, 0.0),
        "rewards.overlong_filter": (s.rewards.overlong_filter, False),
        "replay.mode": (s.replay.mode, "off"),
        "updates.stop_at_kl": (s.updates.stop_at_kl, 0.0),
    }
    if reads == "pairs":
        needed["updates.shuffle"] = (s.updates.shuffle, "groups")
    yield from unserved(needed, f"{name} reads {reads} and samples nothing")
    rows = s.updates.micro_batch_rows
    if reads == "pairs" and rows % 2:
        yield f"updates.micro_batch_rows={rows} would part the answers of a pair; give an even number"


def _of_batch(s: Settings) -> Iterator[str]:
    rows, prompts, group, minibatches = s.rows, s.rollout.prompts, s.rollout.group_size, s.updates.minibatches
    micro, cut = s.updates.micro_batch_rows, f"updates.minibatches={minibatches} must divide rollout.prompts"
    if rows % minibatches:
        yield f"{cut} x rollout.group_size = {rows}"
    if s.updates.shuffle == "groups" and prompts % minibatches:
        yield f"{cut}={prompts} with updates.shuffle=groups"
    if micro and rows // minibatches % micro:
        yield f"updates.micro_batch_rows={micro} must divide the {rows // minibatches} rows of a minibatch"
    if s.objective.whole_minibatch and micro not in (0, rows // minibatches):
        yield (
            f"updates.micro_batch_rows={micro} cuts the minibatch that {s.objective_name} reads as a whole; set it to 0"
        )
    if group < 2 and s.objective.compares_groups:
        yield (
            f"rollout.group_size={group} leaves {s.objective_name} nothing to compare an answer with; set it to at "
            "least 2"
        )
    if s.rollout.slots > rows:
        yield f"rollout.slots={s.rollout.slots} is more than the {rows} answers of a step; set it to 0"


def _of_shared_prompts(s: Settings) -> Iterator[str]:
    """With shared prompts a training row holds a group; its prompt is computed once, so it has one routing and no
    values per answer."""
    updates, group = s.updates, s.rollout.group_size
    if updates.layout != "shared":
        return
    if updates.shuffle != "groups":
        yield f"updates.layout=shared keeps groups whole; set updates.shuffle=groups, not {updates.shuffle}"
    if updates.micro_batch_rows % group:
        yield (
            f"updates.micro_batch_rows={updates.micro_batch_rows} must hold whole groups of "
            f"rollout.group_size={group} with updates.layout=shared"
        )
    dense = {"model.num_experts": (s.model.num_experts, 0), "critic.kind": (s.critic.kind, "none")}
    dense["model.linear_num_value_heads"] = s.model.linear_num_value_heads, 0
    yield from unserved(dense, "updates.layout=shared serves a dense policy without a critic; set that to packed")


def _of_rewards(s: Settings) -> Iterator[str]:
    cache, draws, lag = s.rewards.overlong_cache, s.dynamic_sampling.max_draws, s.rollout.lag
    if cache > s.answer_length:
        yield f"rewards.overlong_cache={cache} must be at most rollout.max_new_tokens={s.answer_length}"
    if draws > 1 and "verifier" not in s.rewards.weights:
        yield (
            f"dynamic_sampling.max_draws={draws} keeps groups by the verifier's rewards, which "
            "rewards.verifier_weight=0 takes out; set max_draws=1"
        )
    if draws > 1 and lag:
        yield (
            f"rollout.lag={lag} asks for rollouts before the verifier has judged those ahead of them, and "
            f"dynamic_sampling.max_draws={draws} draws again by its rewards; set rollout.lag=0 or "
            "dynamic_sampling.max_draws=1"
        )


def check_rows(s: Settings, devices: int) -> None:
    """Raises ValueError where rows of a run on so many devices would not be divided among those that mesh.shape and
    rollout.mesh_shape spread them over, so that devices would repeat one another's work or a program not compile.

    For a run about to train; a DIR can be opened on any number of devices.
    """
    shape = sharding.resolved(s.mesh.shape, devices)
    where = sharding.resolved(s.rollout.mesh_shape or shape, math.prod(shape), "rollout.mesh_shape")
    for fault in (*_of_sizes(s, shape), *_of_rows(s, shape, where)):
        raise ValueError(fault)


def _of_mesh(s: Settings) -> Iterator[str]:
    """A size of -1 is 1 here, the least that it can become: what that does not divide, no number of devices does."""
    return _of_sizes(s, sharding.resolved(s.mesh.shape, abs(math.prod(s.mesh.shape))))


def _of_sizes(s: Settings, sizes: Sequence[int]) -> Iterator[str]:
    """sizes: of mesh.shape, none of them -1."""
    shared, shape = s.updates.layout == "shared", _shown("mesh.shape", s.mesh.shape, sizes)
    lanes, context = math.prod(sizes[:3]), sizes[4]  # data, fsdp and expert
    minibatch = s.rows // s.updates.minibatches
    micro = s.updates.micro_batch_rows or minibatch
    micro //= s.rollout.group_size if shared else 1
    if shared and context > 1:
        yield (
            f"{shape} splits rows over {context} devices, and updates.layout=shared keeps them whole; "
            "set the fifth size to 1, or updates.layout=packed"
        )
    wider = "" if shared or minibatch % lanes else f"set updates.micro_batch_rows={lanes}, or "
    remedy = f"{wider}change mesh.shape, updates.micro_batch_rows or updates.minibatches"
    yield from _undivided(shape, micro, "rows of a micro-batch", lanes, remedy)
    if s.objective.reads == "rollouts":
        remedy = "change mesh.shape, rollout.prompts or rollout.group_size"
        yield from _undivided(shape, s.rows, "answers of a rollout", lanes * context, remedy)


def _of_rows(s: Settings, sizes: Sequence[int], sampling: Sequence[int]) -> Iterator[str]:
    """Rows beside those of micro-batches and rollouts; sampling: the sizes of the mesh of rollouts."""
    shape, parts = _shown("mesh.shape", s.mesh.shape, sizes), math.prod(sizes) // sizes[3]  # all but tensor
    if s.warm_start.steps:
        batch = s.warm_start.batch_size
        yield from _undivided(shape, batch, "answers of a warm start", parts, "change warm_start.batch_size")
    if s.objective.reads != "rollouts":  # pairs are scored by so many rows at a time
        rows = s.rows // (s.updates.minibatches if s.objective.reads == "pairs" else 1)
        yield from _undivided(shape, rows, "rows", parts, "change rollout.prompts")
        return
    field, slots, parts = "rollout.mesh_shape", s.rollout.slots, math.prod(sampling) // sampling[3]
    shape = _shown(field, s.rollout.mesh_shape, sampling) if s.rollout.mesh_shape else shape
    yield from _undivided(
        shape, s.rows, "answers of a rollout", parts, f"change {field}, rollout.prompts or rollout.group_size"
    )
    yield from _undivided(shape, slots, "slots", parts, f"set rollout.slots={-(-slots // parts) * parts}, or 0")


def _undivided(shape: str, count: int, what: str, devices: int, remedy: str) -> Iterator[str]:
    """A fault where the devices that a mesh spreads rows over do not divide them."""
    if count % devices:
        yield f"{shape} spreads {count} {what} over {devices} devices, which must divide them; {remedy}"


def _shown(field: str, shape: Sequence[int], sizes: Sequence[int]) -> str:
    """The field as it is given, with the number of devices where a -1 stands for it."""
    return f"{field}={tuple(shape)}" + (f" on {math.prod(sizes)} devices" if -1 in shape else "")


def _of_critic(s: Settings) -> Iterator[str]:
    kind, needed = s.critic.kind, s.objective.needs_values
    if needed and kind == "none":
        yield f"objective.name={s.objective_name!r} needs values; set critic.kind to head or separate"
    if not needed and kind != "none":
        yield f"critic.kind={kind!r} serves no {s.objective_name}; set it to none"


def _of_greedy(s: Settings) -> Iterator[str]:
    if s.greedy_last:
        fields = {"rollout.engine": (s.rollout.engine, "jax"), "rollout.lag": (s.rollout.lag, 0)}
        yield from unserved(fields, "objective.advantage=remax draws a greedy answer with each group")
        if s.task.environment is not None:
            yield f"task.name={s.task.name!r} has no greedy episode for objective.advantage=remax; choose another"


def _of_teacher(s: Settings) -> Iterator[str]:
    taught, path = {"teacher_logprobs", "teacher_divergence"} & s.objective.needs, s.teacher.path
    if taught and not path:
        yield "objective.advantage=teacher and teacher_coef read a teacher; set teacher.path to a DIR or a checkpoint"
    if path and not taught:
        yield f"teacher.path={path!r} teaches {s.objective_name} nothing; set objective.advantage=teacher, or clear it"
    if s.teacher != TeacherConfig():
        yield from _TEACHERS["faults_of_teachers"](s)


def _of_numerics(s: Settings) -> Iterator[str]:
    if s.model.numerics != "exact":
        return
    own = {"model.experts_implementation": (s.model.experts_implementation, "auto")}
    if s.model.attention_implementation != "plain":  # of the backward, which for shared prompts is never flash
        own["model.attention_implementation"] = s.model.attention_implementation, "auto"
    if s.objective.reads == "rollouts":
        own |= {"rollout.engine": (s.rollout.engine, "jax"), "rollout.dtype": (s.rollout.dtype, s.model.dtype)}
    yield from unserved(own, "model.numerics=exact samples and trains by the same kernels")
    if s.rollout.router != EXACT:
        yield "rollout.router_dtype, _noise and _bias make a sampler differ, and model.numerics=exact no difference"
    for field, shape in {"mesh.shape": s.mesh.shape, "rollout.mesh_shape": s.rollout.mesh_shape}.items():
        if any(size != 1 for size in shape[3:]):
            why = "model.numerics=exact cuts neither matrices nor the time of a row"
            yield f"{field}={tuple(shape)}: {why}; set its sizes from the fourth on to 1"


def _of_turns(s: Settings) -> Iterator[str]:
    if s.task.environment is not None:
        yield from _OVER_TURNS["faults_of_episodes"](s)
        return
    own = ("max_turns", "max_observation_length", "max_episode_length")
    fields = {f"rollout.{name}": (getattr(s.rollout, name), 0) for name in own} | {
        "rewards.turn_gamma": (s.rewards.turn_gamma, 1.0)
    }
    yield from unserved(fields, f"task.name={s.task.name!r} has no environment, and one turn")


def _of_best(s: Settings) -> Iterator[str]:
    known = evaluated_keys(s)
    if s.checkpoint.best and s.checkpoint.best not in known:
        yield f"checkpoint.best={s.checkpoint.best!r} is no metric of the run's evaluations; give {', '.join(known)}"


def _of_routing(s: Settings) -> Iterator[str]:
    model, jax_only, rate = s.model, s.rollout.engine == "vllm", s.updates.router_bias_rate
    if s.rollout.router != EXACT and (jax_only or not model.num_moe_layers):
        yield "rollout.router_dtype, _noise, _bias and _gates are of an MoE model and the jax engine; leave them out"
    if jax_only and s.replay.mode == "R3" and s.replay.what == "logits":
        yield "replay.what=logits: servers return experts and no logits; set replay.what=experts, or rollout.engine=jax"
    if not model.num_moe_layers:
        routed = {"replay.mode": (s.replay.mode, "off"), "updates.aux_coef": (s.updates.aux_coef, 0.0)}
        routed |= {"updates.router_bias_rate": (rate, 0.0)}
        yield from unserved(routed, "a model with model.num_experts=0 routes nothing")
        if "router_logprobs" in s.objective.needs:
            yield f"objective.name={s.objective_name!r} weighs router shift and needs model.num_experts > 0"
        return
    if rate and not (model.selection_bias and s.objective.reads == "answers" and not s.lora.rank):
        yield (
            f"updates.router_bias_rate={rate:g} moves the bias of a gate (model.selection_bias=True) in supervised "
            "training of all parameters (objective.name=sft, lora.rank=0), and here it is frozen; set it to 0"
        )
    constant_gates = model.num_experts_per_tok == 1 and model.norm_topk_prob
    if constant_gates and s.optimizer.router_factor and not s.updates.aux_coef:
        yield (
            "model.num_experts_per_tok=1 with norm_topk_prob makes every gate 1, so the router gets no gradient; "
            "set norm_topk_prob=False, or say that you know by optimizer.router_factor=0"
        )


_FAULTS = (
    _of_data,
    _of_batch,
    _of_shared_prompts,
    _of_rewards,
    _of_mesh,
    _of_critic,
    _of_greedy,
    _of_teacher,
    _of_routing,
    _of_numerics,
    _of_turns,
    _of_best,
)
