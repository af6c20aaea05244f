"""config.json of a published Qwen3 or Qwen3-MoE checkpoint <-> ModelConfig, in the old and the new spelling."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.config import ModelConfig

__all__ = ["from_published", "to_published"]

_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_SAME_NAME = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
)
_SAME_NAME_MOE = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")


def from_published(published: Mapping[str, Any], dtype: str | None = None) -> ModelConfig:
    """The ModelConfig of a config.json.

    Args:
      published: its content. Read in either spelling: num_local_experts or num_experts, rope_parameters.rope_theta or
        rope_theta, dtype or torch_dtype.
      dtype: float32 or bfloat16, of the parameters and of the computation; default: the file's.

    Raises:
      ValueError: another model type; a field that is missing; a field that asks for what this model does not compute
        (attention bias, sliding window, RoPE scaling, another activation, quantised weights).
    """
    kind = published.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ValueError(f"config.json: model_type={kind!r} is not one of {', '.join(_ARCHITECTURES)}; no other loads")
    rope = published.get("rope_parameters") or {}
    _refuse_what_is_not_computed(published, rope)
    fields = {name: _required(published, name) for name in _SAME_NAME}
    fields["rope_theta"] = float(_required({**published, **rope}, "rope_theta"))
    fields["tie_word_embeddings"] = bool(published.get("tie_word_embeddings", False))
    if kind == "qwen3_moe":
        fields |= {name: _required(published, name) for name in _SAME_NAME_MOE}
        fields["num_experts"] = _required(published, "num_local_experts", "num_experts")
        fields["mlp_only_layers"] = tuple(published.get("mlp_only_layers") or ())
    stored = dtype or published.get("dtype") or published.get("torch_dtype")
    if stored not in ("float32", "bfloat16"):
        raise ValueError(
            f"config.json: dtype={stored!r} is not float32 or bfloat16; pass dtype='float32' or 'bfloat16'"
        )
    return ModelConfig(**fields, param_dtype=stored, dtype=stored)


def to_published(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a ModelConfig, in both spellings."""
    kind = "qwen3_moe" if config.num_moe_layers else "qwen3"
    values = dataclasses.asdict(config)
    published = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        **{name: values[name] for name in _SAME_NAME},
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "dtype": config.param_dtype,
        "torch_dtype": config.param_dtype,
    }
    if kind == "qwen3_moe":
        published |= {name: values[name] for name in _SAME_NAME_MOE}
        published |= {name: config.num_experts for name in ("num_local_experts", "num_experts")}
        published["mlp_only_layers"] = list(config.mlp_only_layers)
    return published


def _required(published: Mapping[str, Any], *spellings: str) -> Any:
    for name in spellings:
        if published.get(name) is not None:
            return published[name]
    raise ValueError(f"config.json has no {' or '.join(spellings)}; add it: a default would be a guess")


def _refuse_what_is_not_computed(published: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    scaling = published.get("rope_scaling") or {}
    rope_types = {rope.get("rope_type"), scaling.get("rope_type"), scaling.get("type")} - {None, "default"}
    sliding = published.get("use_sliding_window") or "sliding_attention" in (published.get("layer_types") or ())
    refused = {
        "attention_bias": (published.get("attention_bias"), published.get("attention_bias")),
        "use_sliding_window": (sliding, sliding),
        "rope scaling": (rope_types, ", ".join(sorted(rope_types))),
        "rope partial_rotary_factor": (rope.get("partial_rotary_factor", 1) != 1, rope.get("partial_rotary_factor")),
        "hidden_act": (published.get("hidden_act", "silu") != "silu", published.get("hidden_act")),
        "quantization_config": (published.get("quantization_config"), "of quantised weights"),
    }
    found = [f"{name}={value!r}" for name, (wrong, value) in refused.items() if wrong]
    if found:
        raise ValueError(f"config.json asks for {', '.join(found)}, which this model does not compute; it cannot load")
