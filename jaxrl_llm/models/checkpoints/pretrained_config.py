"""config.json of a published checkpoint <-> ModelConfig, in the old and the new spelling."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.architecture import OF_THE_RUN, ModelConfig
from jaxrl_llm.models.attention.layer_kinds import SLIDING
from jaxrl_llm.models.attention.rope_scaling import FIELDS as SCALING
from jaxrl_llm.models.checkpoints.family_fields import required
from jaxrl_llm.models.checkpoints.family_table import FAMILIES, Family
from jaxrl_llm.models.checkpoints.rope_fields import (
    kind_of,
    read_rope,
    read_windows,
    ropes_of,
    rotary_of,
    written_rope,
    written_windows,
)

_SAME_NAME = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
)
_SPELLINGS = {"num_experts": ("num_local_experts", "num_experts")}
_SHOWN = ("qk_norm", "attention_bias", "num_experts", "norm_topk_prob")
_CHOICES = (
    *_SHOWN,
    *("scoring_func", "selection_bias", "n_group", "topk_group", "routed_scaling_factor"),
    *("shared_expert_intermediate_size", "shared_expert_gate", "partial_rotary_factor", "attention_multiplier"),
    *("embedding_multiplier", "residual_multiplier", "logits_scaling", "sliding_window", "layer_types"),
    *("no_rope_layers", "sliding_rope_theta", "rope_type", "rope_interleave"),
    *("attention_output_bias", "attention_sinks", "expert_bias", "swiglu_limit"),
    *("kv_lora_rank", "group_score", "norm_placement", "norm_offset", "hidden_act"),
    *("attn_output_gate", "linear_num_value_heads"),
)


def family_of(config: ModelConfig, given: str = "") -> str:
    """The model_type that computes what `config` asks for: `given`, or the first whose config.json reads back as it.

    Raises:
      ValueError: there is none.
    """
    for name in dict.fromkeys([given] * (given in FAMILIES) + list(FAMILIES)):
        parts = {"num_experts": config.num_moe_layers > 0, "kv_lora_rank": config.kv_lora_rank > 0}
        if any((part in FAMILIES[name].named) != has for part, has in parts.items()):
            continue
        with contextlib.suppress(ValueError, ArithmeticError):
            if _read_by_layers(_config_of(_written(config, name), None)) == _read_by_layers(config):
                return name
    defaults = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
    asked = {name: value for name, value in dataclasses.asdict(config).items() if name in _CHOICES}
    shown = ", ".join(f"{name}={asked[name]!r}" for name in _CHOICES if name in _SHOWN or asked[name] != defaults[name])
    raise ValueError(f"no published family has model.{shown} and these sizes; the families are {', '.join(FAMILIES)}")


def _read_by_layers(config: ModelConfig) -> dict[str, Any]:
    """The fields that make another model."""
    free = {*OF_THE_RUN, *config.of_no_layer}
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in free}


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


_SIZES = (
    *_SAME_NAME[:-1],
    "head_dim",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "no_rope_layer_interval",
    "moe_num_experts",
    "moe_k",
    "moe_layer_interval",
    "n_group",
    "topk_group",
    "rotary_dim",
    "sliding_window_pattern",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "full_attention_interval",
    "query_pre_attn_scalar",
)
_COUNTS = (  # 0 is one
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "n_shared_experts",
    "moe_num_shared_experts",
    "sliding_window",
    "moe_layer_start_index",
    "moe_layer_end_index",
    "first_k_dense_replace",
    "shared_expert_intermediate_size",
)
_NUMBERS = (
    "rms_norm_eps",
    "rope_theta",
    "rope_local_base_freq",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
    "routed_scaling_factor",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "swiglu_limit",
)
_KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), (dict, "an object")),
    **dict.fromkeys(("mlp_only_layers", "layer_types", "mlp_layer_types", "no_rope_layers"), (list, "a list")),
    **dict.fromkeys(("dtype", "torch_dtype", "hidden_act"), (str, "a word")),
    **dict.fromkeys(("tie_word_embeddings", "use_qk_norm", "rope_interleave", "qkv_bias"), (bool, "true or false")),
}
_MOST = 2**31 - 1  # of a size
_MOST_LAYERS = 10_000


def _check_kinds(published: Mapping[str, Any]) -> None:
    """Refuses a field that is not of the kind that its name stands for, before anything is computed with it."""
    wanted = dict.fromkeys((*_SIZES, *_COUNTS), f"a whole number from 1 to {_MOST}")
    wanted |= {"num_hidden_layers": f"a whole number from 1 to {_MOST_LAYERS}"}
    wrong = []
    for name, words in wanted.items():
        value, most = published.get(name), _MOST_LAYERS if name == "num_hidden_layers" else _MOST
        least = -1 if name == "moe_layer_end_index" else 0 if name in _COUNTS else 1  # -1: the last
        if value is not None and not (type(value) is int and least <= value <= most):
            wrong.append((name, value, words))
    ropes = [published[name] for name in ("rope_scaling", "rope_parameters") if isinstance(published.get(name), dict)]
    ropes += [one for rope in ropes for one in rope.values() if isinstance(one, dict)]
    for fields in (published, *ropes):
        for name, (kind, words) in _KINDS.items():
            value = fields.get(name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool) > (kind is bool)):
                wrong.append((name, value, words))
        numbers = (*(name for names in SCALING.values() for name in names if name != "truncate"), *_NUMBERS)
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
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"config.json: model_type={kind!r} is not one of {', '.join(FAMILIES)}; no other loads")
    family = FAMILIES[kind]
    _refuse_what_is_not_computed(family, published)
    fields = {name: required(published, name) for name in _SAME_NAME if name not in family.named}
    fields["head_dim"] = _head_dim(family, published)
    fields |= read_rope(family, published, fields["head_dim"]) | read_windows(family, published)
    fields["tie_word_embeddings"] = bool(published.get("tie_word_embeddings", family.tied))
    fields |= family.always
    for ours, theirs in family.named.items():
        fields[ours] = required(published, *dict.fromkeys((*_SPELLINGS.get(ours, ()), theirs)))
    fields |= family.read(published)
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
    kind = family_of(config, (published or {}).get("model_type", ""))
    kept = {name: value for name, value in (published or {}).items() if name != "quantization_config"}
    return {**kept, **_written(config, kind)}


def _written(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The fields of config.json that state a ModelConfig of this family."""
    family, values = FAMILIES[kind], dataclasses.asdict(config)
    experts = dict.fromkeys(_SPELLINGS["num_experts"], config.num_experts) if "num_experts" in family.named else {}
    return {
        "architectures": [family.architecture],
        "model_type": kind,
        **{name: values[name] for name in (*_SAME_NAME, "head_dim", "tie_word_embeddings")},
        "hidden_act": "silu",
        "dtype": config.param_dtype,
        "torch_dtype": config.param_dtype,
        **written_rope(family, config),
        **written_windows(family, config),
        **experts,
        **{theirs: values[ours] for ours, theirs in family.named.items()},
        **family.computed,
        **family.write(config),
    }


def _head_dim(family: Family, published: Mapping[str, Any]) -> int:
    if family.head_dim == "required":  # not implied by the other sizes
        return required(published, "head_dim")
    if family.head_dim == "parts":
        return required(published, "qk_nope_head_dim") + required(published, "qk_rope_head_dim")
    return published.get("head_dim") or published["hidden_size"] // published["num_attention_heads"]


def _refuse_what_is_not_computed(family: Family, published: Mapping[str, Any]) -> None:
    def asked(name: str) -> tuple[Any, Any]:
        return published.get(name), published.get(name)

    sliding = published.get("use_sliding_window") or "sliding_attention" in (published.get("layer_types") or ())
    window = None if family.window == "by flag" else published.get("sliding_window", family.window)
    layers = set(published.get("layer_types") or ()) if family.full_every == 0 else set()
    if family.full_every is not None:
        sliding = window = None
    quantised = published.get("quantization_config")
    if family.quantised and quantised and quantised.get("quant_method") == family.quantised:
        quantised = None
    rope, of_sliding = ropes_of(family, published)
    types = {kind_of(rope)} - {None, *SCALING} | {kind_of(of_sliding or {})} - {None}
    rotary = 1 if family.rotary is not None else rotary_of(1.0, published, rope)
    act = family.computed.get("hidden_act", "silu")
    refused = {
        **{
            name: asked(name)
            for name in ("attention_bias", "mlp_bias")
            if name not in {**family.named, **family.computed}
        },
        "clip_qkv": (published.get("clip_qkv") is not None, published.get("clip_qkv")),
        "use_sliding_window": (sliding, sliding),
        "sliding_window": (window, window),
        "layer_types": (layers - {SLIDING}, published.get("layer_types")),
        "rope scaling": (types, ", ".join(sorted(map(str, types)))),
        "rope partial_rotary_factor": (rotary != 1, rotary),
        "hidden_act": (published.get("hidden_act", act) != act, published.get("hidden_act")),
        "quantization_config": (quantised, quantised and quantised.get("quant_method", quantised)),
        "is_causal": (published.get("is_causal") is False, False),
    }
    for name, value in family.computed.items():
        given = published.get(name, value)
        refused.setdefault(name, (given is not None and given != value, given))
    wrong = [f"{name}={value!r}" for name, (is_wrong, value) in refused.items() if is_wrong]
    if wrong:
        raise ValueError(f"config.json asks for {', '.join(wrong)}, which this model does not compute; it cannot load")
