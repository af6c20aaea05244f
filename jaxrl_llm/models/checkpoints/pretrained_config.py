"""config.json of a published checkpoint <-> ModelConfig, in the old and the new spelling, and how families differ."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.architecture import ModelConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """architecture: the class of transformers. experts: names of config.json -> ours; empty for a dense family."""

    architecture: str
    qk_norm: str = "none"
    attention_bias: bool = False
    experts: Mapping[str, str] = dataclasses.field(default_factory=dict)


_WIDTH_IS_EXPERTS = {"num_experts_per_tok": "num_experts_per_tok", "intermediate_size": "moe_intermediate_size"}
_QWEN3_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")
_FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="head"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm="head", experts={name: name for name in _QWEN3_EXPERTS}),
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", attention_bias=True),
    "olmoe": Family("OlmoeForCausalLM", "full", experts={**_WIDTH_IS_EXPERTS, "norm_topk_prob": "norm_topk_prob"}),
    "mixtral": Family("MixtralForCausalLM", experts=_WIDTH_IS_EXPERTS),
    "mistral": Family("MistralForCausalLM"),  # without a window it computes what llama does
}
_SAME_NAME = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
)
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_HEAD_DIM_IS_IMPLIED = ("qwen2", "olmoe")  # hidden_size / num_attention_heads, whatever config.json says


def family_of(config: ModelConfig) -> str:
    """The model_type that computes what `config` asks for; ValueError if none does."""
    moe = config.num_moe_layers > 0
    asked = (config.qk_norm, config.attention_bias, moe)
    for name, family in _FAMILIES.items():
        same = asked == (family.qk_norm, family.attention_bias, bool(family.experts))
        whole = name in ("olmoe", "mixtral") and "dense" in config.kinds
        gates = "norm_topk_prob" not in family.experts and moe and not config.norm_topk_prob
        width = name in _HEAD_DIM_IS_IMPLIED and config.head_dim * config.num_attention_heads != config.hidden_size
        if same and not (whole or gates or width):
            return name
    raise ValueError(
        f"no published family has model.qk_norm={config.qk_norm!r}, attention_bias={config.attention_bias}, "
        f"num_experts={config.num_experts}, norm_topk_prob={config.norm_topk_prob} and these sizes; the families are "
        f"{', '.join(_FAMILIES)}"
    )


def from_published(
    published: Mapping[str, Any], dtype: str | None = None, where: str | os.PathLike[str] = ""
) -> ModelConfig:
    """The ModelConfig of the content of a config.json; dtype: of parameters and computation, by default the file's.

    Raises:
      ValueError: another model type; a field that is missing or of another kind; a field that asks for what this model
        does not compute. The message begins with `where`, the checkpoint's path, if it is given.
    """
    try:
        _check_kinds(published)
        return _config_of(published, dtype)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


_SIZES = (*_SAME_NAME[:-1], "head_dim", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
_KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (dict, "an object")),
    **dict.fromkeys(("mlp_only_layers", "layer_types"), (list, "a list")),
    **dict.fromkeys(("dtype", "torch_dtype", "hidden_act"), (str, "a word")),
}
_MOST = 2**31 - 1  # of a size
_MOST_LAYERS = 10_000


def _check_kinds(published: Mapping[str, Any]) -> None:
    """Refuses a field that is not of the kind that its name stands for, before anything is computed with it."""
    wanted = dict.fromkeys((*_SIZES, "num_local_experts", "num_experts"), f"a whole number from 1 to {_MOST}")
    wanted |= {"num_hidden_layers": f"a whole number from 1 to {_MOST_LAYERS}"}
    wrong = []
    for name, words in wanted.items():
        value, most = published.get(name), _MOST_LAYERS if name == "num_hidden_layers" else _MOST
        least = 0 if name.endswith("experts") else 1  # a dense model may say so
        if value is not None and not (type(value) is int and least <= value <= most):
            wrong.append((name, value, words))
    ropes = [published[name] for name in ("rope_scaling", "rope_parameters") if isinstance(published.get(name), dict)]
    for fields in (published, *ropes):
        for name, (kind, words) in _KINDS.items():
            value = fields.get(name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                wrong.append((name, value, words))
        numbers = (*_SCALING, "rms_norm_eps", "rope_theta")
        wrong += [(name, fields[name], "a number") for name in numbers if not _is_number(fields.get(name))]
    for rope in ropes:
        texts = [name for name in ("rope_type", "type") if not isinstance(rope.get(name), str | None)]
        wrong += [(name, rope[name], "a word") for name in texts]
    if wrong:
        name, value, words = wrong[0]
        raise ValueError(f"config.json: {name}={value!r:.60} must be {words}; fetch the checkpoint again or correct it")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300)


def _config_of(published: Mapping[str, Any], dtype: str | None) -> ModelConfig:
    kind = published.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ValueError(f"config.json: model_type={kind!r} is not one of {', '.join(_FAMILIES)}; no other loads")
    family = _FAMILIES[kind]
    spellings = [published.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    rope = {**spellings[0], **spellings[1]}
    rope_types = {r.get(name) for r in spellings for name in ("rope_type", "type")} - {None, "default"}
    _refuse_what_is_not_computed(kind, published, rope, rope_types - {"llama3"})
    fields = {name: _required(published, name) for name in _SAME_NAME}
    fields["rope_theta"] = float(_required({**published, **rope}, "rope_theta"))
    if rope_types:
        fields["rope_scaling"] = tuple(float(_required(rope, name)) for name in _SCALING)
    fields["head_dim"] = _head_dim(kind, published)
    fields |= {"qk_norm": family.qk_norm, "attention_bias": family.attention_bias}
    fields["tie_word_embeddings"] = bool(published.get("tie_word_embeddings", False))
    if family.experts:
        fields |= {ours: _required(published, theirs) for theirs, ours in family.experts.items()}
        fields["num_experts"] = _required(published, "num_local_experts", "num_experts")
        fields["mlp_only_layers"] = tuple(published.get("mlp_only_layers") or ())
    stored = dtype or published.get("dtype") or published.get("torch_dtype")
    if stored in (None, "float16"):  # float32 holds both halves exactly
        stored = "float32"
    if stored not in ("float32", "bfloat16"):
        raise ValueError(
            f"config.json: dtype={stored!r} is not float32, bfloat16 or float16; pass dtype='float32' or 'bfloat16'"
        )
    return ModelConfig(**fields, param_dtype=stored, dtype=stored)


def to_published(config: ModelConfig, published: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a ModelConfig, in both spellings; fields of `published` beyond the architecture are kept."""
    kind = family_of(config)
    if kind == "llama" and (published or {}).get("model_type") == "mistral":
        kind = "mistral"
    values = dataclasses.asdict(config)
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling:
        rope |= {"rope_type": "llama3", **dict(zip(_SCALING, config.rope_scaling, strict=True))}
        rope["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    ours = {
        "architectures": [_FAMILIES[kind].architecture],
        "model_type": kind,
        **{name: values[name] for name in (*_SAME_NAME, "head_dim", "tie_word_embeddings", "rope_theta")},
        "hidden_act": "silu",
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "rope_scaling": rope if config.rope_scaling else None,
        "dtype": config.param_dtype,
        "torch_dtype": config.param_dtype,
    }
    if kind in ("qwen3", "qwen3_moe"):
        ours |= {"attention_bias": False, "use_sliding_window": False}
    if experts := _FAMILIES[kind].experts:
        ours |= {theirs: values[name] for theirs, name in experts.items()}
        ours |= {name: config.num_experts for name in ("num_local_experts", "num_experts")}
    if kind == "qwen3_moe":
        ours["mlp_only_layers"] = list(config.mlp_only_layers)
    return {**(published or {}), **ours}


def _head_dim(kind: str, published: Mapping[str, Any]) -> int:
    implied = published["hidden_size"] // published["num_attention_heads"]
    if kind in ("qwen3", "qwen3_moe"):  # whose head_dim is not implied by the other sizes
        return _required(published, "head_dim")
    return implied if kind in _HEAD_DIM_IS_IMPLIED else published.get("head_dim") or implied


def _required(published: Mapping[str, Any], *spellings: str) -> Any:
    for name in spellings:
        if published.get(name) is not None:
            return published[name]
    raise ValueError(f"config.json has no {' or '.join(spellings)}; add it: a default would be a guess")


def _refuse_what_is_not_computed(
    kind: str, published: Mapping[str, Any], rope: Mapping[str, Any], rope_types: set[Any]
) -> None:
    sliding = published.get("use_sliding_window") or "sliding_attention" in (published.get("layer_types") or ())
    windows = {"mistral": 4096, "mixtral": None}  # where config.json has none; elsewhere it counts with the flag only
    window = published.get("sliding_window", windows[kind]) if kind in windows else None
    refused = {
        "attention_bias": (published.get("attention_bias"), published.get("attention_bias")),
        "mlp_bias": (published.get("mlp_bias"), published.get("mlp_bias")),
        "clip_qkv": (published.get("clip_qkv") is not None, published.get("clip_qkv")),
        "use_sliding_window": (sliding, sliding),
        "sliding_window": (window, window),
        "rope scaling": (rope_types, ", ".join(sorted(rope_types))),
        "rope partial_rotary_factor": (rope.get("partial_rotary_factor", 1) != 1, rope.get("partial_rotary_factor")),
        "hidden_act": (published.get("hidden_act", "silu") != "silu", published.get("hidden_act")),
        "quantization_config": (published.get("quantization_config"), "of quantised weights"),
    }
    wrong = [f"{name}={value!r}" for name, (is_wrong, value) in refused.items() if is_wrong]
    if wrong:
        raise ValueError(f"config.json asks for {', '.join(wrong)}, which this model does not compute; it cannot load")
