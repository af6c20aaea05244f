"""Fields of config.json that take more than a name, of the families that have them: each function without `written`
gives fields of ModelConfig, its partner those of config.json."""

import itertools
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.attention.layer_kinds import FULL, LINEAR

_ERNIE_LAYERS = {"interval": 1, "start_index": 1, "end_index": -1}
_DENSE_OR_NOT = {"dense", "sparse"}


def required(published: Mapping[str, Any], *spellings: str) -> Any:
    """Return the value of the first of these fields that is there.

    Raises:
      ValueError: none is.
    """
    for name in spellings:
        if published.get(name) is not None:
            return published[name]
    raise ValueError(f"config.json has no {' or '.join(spellings)}; add it: a default would be a guess")


def _shared_width(published: Mapping[str, Any], count: str) -> dict[str, int]:
    width = required(published, "moe_intermediate_size")
    return {"shared_expert_intermediate_size": required(published, count) * width}


def qwen_layers(published: Mapping[str, Any]) -> dict[str, Any]:
    return {"mlp_only_layers": tuple(published.get("mlp_only_layers") or ())}


def written_qwen_layers(config: ModelConfig) -> dict[str, Any]:
    return {"mlp_only_layers": list(config.mlp_only_layers)}


def delta_layers(published: Mapping[str, Any]) -> dict[str, Any]:
    every = published.get("full_attention_interval") or 4
    types = [FULL if (layer + 1) % every == 0 else LINEAR for layer in range(published["num_hidden_layers"])]
    return {**qwen_layers(published), "layer_types": tuple(published.get("layer_types") or types)}


def written_delta_layers(config: ModelConfig) -> dict[str, Any]:
    return {**written_qwen_layers(config), "layer_types": list(config.layer_types)}


def grouped_delta_tensors(config: ModelConfig) -> dict[tuple[str, ...], str]:
    """Qwen3-Next's: queries, keys, values and gates of a key head side by side, and so the two small projections."""
    heads = config.linear_num_value_heads // config.linear_num_key_heads
    key, value = config.linear_key_head_dim, heads * config.linear_value_head_dim
    return {
        **_delta_tensors(config),
        **_rows("linear_attn.in_proj_qkvz", in_q=key, in_k=key, in_v=value, in_z=value),
        **_rows("linear_attn.in_proj_ba", in_b=heads, in_a=heads),
    }


def delta_tensors(config: ModelConfig) -> dict[tuple[str, ...], str]:
    """Qwen3.5's: one projection of queries, keys and values, and one each of gates, beta and decay."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return {
        **_delta_tensors(config),
        **_rows("linear_attn.in_proj_qkv", in_q=keys, in_k=keys, in_v=values),
        **{("attention", f"in_{part}"): f"linear_attn.in_proj_{part}.weight" for part in "zba"},
    }


def _delta_tensors(config: ModelConfig) -> dict[tuple[str, ...], str]:
    return {
        **_rows("self_attn.q_proj", q=config.head_dim, out_gate=config.head_dim),
        ("attention", "convolution"): "linear_attn.conv1d.weight",
        ("attention", "decay"): "linear_attn.A_log",
        ("attention", "decay_bias"): "linear_attn.dt_bias",
        ("attention", "out_norm", "scale"): "linear_attn.norm.weight",
        ("attention", "out"): "linear_attn.out_proj.weight",
    }


def _rows(name: str, **sizes: int) -> dict[tuple[str, ...], str]:
    """Names of parts whose rows follow each other in blocks."""
    ends, block = itertools.accumulate(sizes.values()), sum(sizes.values())
    parts = zip(sizes.items(), ends, strict=True)
    return {("attention", part): f"{name}.weight[{end - size}-{end}@{block}]" for (part, size), end in parts}


def glm_layers(published: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "mlp_only_layers": tuple(range(required(published, "first_k_dense_replace"))),
        **_shared_width(published, "n_shared_experts"),
        "qk_norm": "head" if published.get("use_qk_norm") else "none",
    }


def written_glm_layers(config: ModelConfig) -> dict[str, Any]:
    return {
        "first_k_dense_replace": len(config.mlp_only_layers),
        "n_shared_experts": config.shared_expert_intermediate_size // config.moe_intermediate_size,
        "use_qk_norm": config.qk_norm == "head",
        "num_nextn_predict_layers": 0,  # layers that predict further tokens are not read
    }


def ernie_layers(published: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: x for name in _ERNIE_LAYERS if (x := published.get(f"moe_layer_{name}")) is not None}
    step, start, end = {**_ERNIE_LAYERS, **given}.values()
    layers = published["num_hidden_layers"]
    end = layers - 1 if end == -1 else end
    return {
        "decoder_sparse_step": step,
        "mlp_only_layers": tuple(i for i in range(step - 1, layers, step) if not start <= i <= end),
        **_shared_width(published, "moe_num_shared_experts"),
    }


def written_ernie_layers(config: ModelConfig) -> dict[str, Any]:
    moe = [layer for layer, kind in enumerate(config.kinds) if kind == "moe"]
    return {
        "moe_layer_interval": config.decoder_sparse_step,
        "moe_layer_start_index": moe[0],
        "moe_layer_end_index": moe[-1],
        "moe_num_shared_experts": config.shared_expert_intermediate_size // config.moe_intermediate_size,
    }


def latent_layers(published: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek's: the first layers dense, or those that `mlp_layer_types` says."""
    types = published.get("mlp_layer_types") or ["dense"] * required(published, "first_k_dense_replace")
    if not {*types} <= _DENSE_OR_NOT:
        raise ValueError(f"config.json: mlp_layer_types has {sorted({*types} - _DENSE_OR_NOT)}, which no layer is")
    return {
        "mlp_only_layers": tuple(layer for layer, kind in enumerate(types) if kind == "dense"),
        **_shared_width(published, "n_shared_experts"),
        "q_lora_rank": published.get("q_lora_rank") or 0,
        "rope_interleave": published.get("rope_interleave", True),
    }


def written_latent_layers(config: ModelConfig) -> dict[str, Any]:
    return {
        "head_dim": config.qk_rope_head_dim,
        "qk_nope_head_dim": config.head_dim - config.qk_rope_head_dim,
        "q_lora_rank": config.q_lora_rank or None,
        "rope_interleave": config.rope_interleave,
        "first_k_dense_replace": len(config.mlp_only_layers),
        "n_shared_experts": config.shared_expert_intermediate_size // config.moe_intermediate_size,
        "num_nextn_predict_layers": 0,
    }


def v2_layers(published: Mapping[str, Any]) -> dict[str, Any]:
    method = published.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"config.json asks for topk_method={method!r}, which this model does not compute")
    groups = ("n_group", "topk_group") if method != "greedy" else ()
    score = {"group_score": "max"} if groups else {}
    return {**latent_layers(published), **score, **{name: required(published, name) for name in groups}}


def written_v2_layers(config: ModelConfig) -> dict[str, Any]:
    method = "group_limited_greedy" if config.group_score == "max" else "greedy"
    return {**written_latent_layers(config), "topk_method": method, **_groups_of(config)}


def _groups_of(config: ModelConfig) -> dict[str, Any]:
    return {"n_group": config.n_group, "topk_group": config.topk_group}


def gemma_scales(published: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": required(published, "query_pre_attn_scalar") ** -0.5,
        "embedding_multiplier": published["hidden_size"] ** 0.5,
    }


def written_gemma_scales(config: ModelConfig) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": round(config.attention_multiplier**-2),
        "rope_local_base_freq": config.sliding_rope_theta or config.rope_theta,
    }


def smollm_layers(published: Mapping[str, Any]) -> dict[str, Any]:
    layers, every = published["num_hidden_layers"], published.get("no_rope_layer_interval") or 4
    rotated = published.get("no_rope_layers") or [int((layer + 1) % every > 0) for layer in range(layers)]
    if len(rotated) != layers or not {*map(str, rotated)} <= {"0", "1"}:
        raise ValueError(f"config.json: no_rope_layers={rotated} must have a 0 or 1 for each of {layers} layers")
    return {"no_rope_layers": tuple(layer for layer in range(layers) if not rotated[layer])}


def minimax_rotary(published: Mapping[str, Any]) -> dict[str, Any]:
    """The rotated share of a head as a number of its dimensions, where no share is given; no layer is linear."""
    if 0 in (published.get("attn_type_list") or ()):
        raise ValueError("config.json asks for linear attention (0 in attn_type_list), which is not computed")
    shares = (published, *(published.get(name) or {} for name in ("rope_parameters", "rope_scaling")))
    if published.get("rotary_dim") is None or any(one.get("partial_rotary_factor") is not None for one in shares):
        return {}
    return {"partial_rotary_factor": published["rotary_dim"] / required(published, "head_dim")}
