"""What two blocks of a configuration must agree on; each message names the fields, their values and what to change."""

import math

from jaxrl_llm.ground.sharding import AXES
from jaxrl_llm.models import EXACT, Model
from jaxrl_llm.models.lora import adapter_axes
from jaxrl_llm.run.blocks import Settings


def check_agreement(s: Settings) -> None:
    """Raises ValueError where two blocks contradict each other."""
    batch = (_check_data, _check_batch, _check_shared_prompts, _check_lengths)
    for check in (*batch, _check_rewards, _check_mesh, _check_critic, _check_routing, _check_lora):
        check(s)


def _check_data(s: Settings) -> None:
    """What an objective on pairs or on given answers has no use for, and what it asks of the others."""
    reads, name = s.objective.reads, s.objective_name
    if reads == "rollouts":
        return
    needed = {
        "rollout.group_size": (s.rollout.group_size, 2 if reads == "pairs" else 1),
        "rollout.temperature": (s.rollout.temperature, 1.0),
        "rollout.top_k": (s.rollout.top_k, 0),
        "rollout.top_p": (s.rollout.top_p, 1.0),
        "rollout.dtype": (s.rollout.dtype, "float32"),
        "dynamic_sampling.max_draws": (s.dynamic_sampling.max_draws, 1),
        "rewards.verifier_weight": (s.rewards.verifier_weight, 1.0),
        "rewards.reward_model": (s.rewards.reward_model, ""),
        "rewards.length_weight": (s.rewards.length_weight, 0.0),
        "rewards.overlong_cache": (s.rewards.overlong_cache, 0),
        "rewards.missing_eos_penalty": (s.rewards.missing_eos_penalty, 0.0),
        "rewards.overlong_filter": (s.rewards.overlong_filter, False),
        "replay.mode": (s.replay.mode, "off"),
    }
    if reads == "pairs":
        needed["updates.shuffle"] = (s.updates.shuffle, "groups")
    for field, (value, only) in needed.items():
        if value != only:
            raise ValueError(f"{field}={value!r}: {name} reads {reads} and samples nothing; set it to {only!r}")
    if reads == "pairs" and s.updates.micro_batch_rows % 2:
        raise ValueError(
            f"updates.micro_batch_rows={s.updates.micro_batch_rows} would part the answers of a pair; give an even "
            "number"
        )


def _check_batch(s: Settings) -> None:
    rows, updates = s.rows, s.updates
    if rows % updates.minibatches:
        raise ValueError(
            f"updates.minibatches={updates.minibatches} must divide rollout.prompts x rollout.group_size = {rows}"
        )
    if updates.shuffle == "groups" and s.rollout.prompts % updates.minibatches:
        raise ValueError(
            f"updates.minibatches={updates.minibatches} must divide rollout.prompts={s.rollout.prompts} "
            "with updates.shuffle=groups"
        )
    per_minibatch = rows // updates.minibatches
    if updates.micro_batch_rows and per_minibatch % updates.micro_batch_rows:
        raise ValueError(
            f"updates.micro_batch_rows={updates.micro_batch_rows} must divide the {per_minibatch} rows of a minibatch"
        )
    if s.objective.whole_minibatch and updates.micro_batch_rows not in (0, per_minibatch):
        raise ValueError(
            f"updates.micro_batch_rows={updates.micro_batch_rows} cuts the minibatch that "
            f"{s.objective_name} reads as a whole; set it to 0"
        )
    if s.rollout.group_size < 2 and s.objective.compares_groups:
        raise ValueError(
            f"rollout.group_size={s.rollout.group_size} leaves {s.objective_name} nothing to compare an answer with; "
            "set it to at least 2"
        )
    if s.rollout.slots and s.rollout.slots > rows:
        raise ValueError(f"rollout.slots={s.rollout.slots} is more than the {rows} answers of a step; set it to 0")


def _check_shared_prompts(s: Settings) -> None:
    """With shared prompts a training row holds a group; its prompt is computed once, so it has one routing and no
    values per answer."""
    updates, group = s.updates, s.rollout.group_size
    if updates.layout != "shared":
        return
    if updates.shuffle != "groups":
        raise ValueError(f"updates.layout=shared keeps groups whole; set updates.shuffle=groups, not {updates.shuffle}")
    if updates.micro_batch_rows % group:
        raise ValueError(
            f"updates.micro_batch_rows={updates.micro_batch_rows} must hold whole groups of "
            f"rollout.group_size={group} with updates.layout=shared"
        )
    for field, value, served in (("model.num_experts", s.model.num_experts, 0), ("critic.kind", s.critic.kind, "none")):
        if value != served:
            raise ValueError(
                f"{field}={value!r}: updates.layout=shared serves a dense policy without a critic; set it to packed"
            )


def _check_mesh(s: Settings) -> None:
    shape = s.mesh.shape
    if len(shape) not in (len(AXES) - 1, len(AXES)):
        raise ValueError(
            f"mesh.shape={shape} must be four whole numbers, for {', '.join(AXES[:-1])}, or five with {AXES[-1]}"
        )
    lanes, context = math.prod(shape[:3]), math.prod(shape[4:])  # data, fsdp and expert
    micro = s.updates.micro_batch_rows or s.rows // s.updates.minibatches
    if s.updates.layout == "shared":
        micro //= s.rollout.group_size
        if context > 1:
            raise ValueError(
                f"mesh.shape={shape} splits rows over {context} devices, and updates.layout=shared keeps them whole; "
                "set the fifth size to 1, or updates.layout=packed"
            )
    if lanes > 1 and (micro % lanes or s.rows % lanes):
        raise ValueError(
            f"mesh.shape={shape} spreads rows over {lanes} devices, which must divide the {micro} rows of a "
            "micro-batch; change mesh.shape, updates.micro_batch_rows or updates.minibatches"
        )
    if s.objective.reads == "rollouts" and lanes * context > 1 and s.rows % (lanes * context):
        raise ValueError(
            f"mesh.shape={shape} samples answers on {lanes * context} devices, which must divide the {s.rows} of a "
            "rollout; change mesh.shape, rollout.prompts or rollout.group_size"
        )


def _check_critic(s: Settings) -> None:
    needed = s.objective.needs_values
    if needed and s.critic.kind == "none":
        raise ValueError(f"objective.name={s.objective_name!r} needs values; set critic.kind to head or separate")
    if not needed and s.critic.kind != "none":
        raise ValueError(f"critic.kind={s.critic.kind!r} serves no {s.objective_name}; set it to none")


def _check_routing(s: Settings) -> None:
    if not s.model.num_moe_layers:
        if s.replay.mode != "off":
            raise ValueError(
                f"replay.mode={s.replay.mode!r} needs an MoE model; set model.num_experts or replay.mode=off"
            )
        if "router_logprobs" in s.objective.needs:
            raise ValueError(f"objective.name={s.objective_name!r} weighs router shift and needs model.num_experts > 0")
        if s.rollout.router != EXACT:
            raise ValueError("rollout.router_noise and rollout.router_dtype are of an MoE model; leave them out")
        if s.updates.aux_coef:
            raise ValueError(f"updates.aux_coef={s.updates.aux_coef} balances experts and needs model.num_experts > 0")
    elif (
        s.model.num_experts_per_tok == 1
        and s.model.norm_topk_prob
        and s.optimizer.router_factor
        and not s.updates.aux_coef
    ):
        raise ValueError(
            "model.num_experts_per_tok=1 with norm_topk_prob makes every gate 1, so the router gets no gradient; "
            "set norm_topk_prob=False, or say that you know by optimizer.router_factor=0"
        )


def _check_rewards(s: Settings) -> None:
    if s.dynamic_sampling.max_draws > 1 and "verifier" not in s.rewards.weights:
        raise ValueError(
            f"dynamic_sampling.max_draws={s.dynamic_sampling.max_draws} keeps groups by the verifier's rewards, which "
            "rewards.verifier_weight=0 takes out; set max_draws=1"
        )


def _check_lengths(s: Settings) -> None:
    cache = s.rewards.overlong_cache
    if cache > s.answer_length:
        raise ValueError(f"rewards.overlong_cache={cache} must be at most rollout.max_new_tokens={s.answer_length}")


def _check_lora(s: Settings) -> None:
    if s.lora.rank:
        adapter_axes(s.lora, Model(s.model))  # raises if the model has no such matrix
