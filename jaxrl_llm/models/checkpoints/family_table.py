"""The families of published checkpoints, one entry each: how its config.json and the names of its tensors differ from
those of Qwen3."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.checkpoints.family_fields import (
    delta_layers,
    delta_tensors,
    ernie_layers,
    gemma_scales,
    glm_layers,
    grouped_delta_tensors,
    latent_layers,
    minimax_rotary,
    qwen_layers,
    required,
    smollm_layers,
    v2_layers,
    written_delta_layers,
    written_ernie_layers,
    written_gemma_scales,
    written_glm_layers,
    written_latent_layers,
    written_qwen_layers,
    written_v2_layers,
)

Tensors = Mapping[tuple[str, ...], str]
_PROJECTIONS = ("gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`.

    architecture: the class of transformers.
    always: fields of ModelConfig with the value that every model of the family has.
    named: fields of ModelConfig by their names in config.json, which must be there.
    read, write: what takes more than a name. `read` gives fields of ModelConfig from a config.json, `write` fields of
      config.json from a ModelConfig.
    computed: fields of config.json with the one value that is computed, which is written too.
    head_dim: in config.json; optional: hidden_size / num_attention_heads if it has none; parts: the sum of
      qk_nope_head_dim and qk_rope_head_dim.
    window: default of `sliding_window`, where that counts without `use_sliding_window`.
    full_every: None refuses windows; else without `layer_types` every n-th layer has none, 0: all have one.
    sliding_theta: default of the theta of sliding layers, which have RoPE without scaling. None: all layers have one
      RoPE.
    local: config.json may have rope_local_base_freq and sliding_window_pattern.
    scaled: without a word on its scaling RoPE is scaled by default in transformers, so the word must be there.
    rotary: default of `partial_rotary_factor`, where other values than 1 are computed.
    tied: default of `tie_word_embeddings`.
    quantised: the one `quant_method` whose weights are read.
    tensors, expert_tensors: names of tensors in all layers, and in those with experts, by the place of our array; a
      function where names of parts hold sizes. `tensor_parts` describes names of parts.
    """

    architecture: str
    always: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    named: Mapping[str, str] = dataclasses.field(default_factory=dict)
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda published: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    computed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    head_dim: Literal["required", "optional", "parts"] = "optional"
    window: int | Literal["by flag"] | None = "by flag"
    full_every: int | None = None
    sliding_theta: float | None = None
    local: bool = False
    scaled: bool = False
    rotary: float | None = None
    tied: bool = False
    quantised: str | None = None
    tensors: Tensors | Callable[[ModelConfig], Tensors] = dataclasses.field(default_factory=dict)
    expert_tensors: Tensors = dataclasses.field(default_factory=dict)

    @property
    def by_kind(self) -> bool:
        """Layers that slide have a RoPE of their own."""
        return self.sliding_theta is not None


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _mixtral_tensors(name: str = "block_sparse_moe.experts.{expert}") -> dict[tuple[str, ...], str]:
    parts = zip(_PROJECTIONS, ("w1", "w3", "w2"), strict=True)
    return {("mlp", "router"): "block_sparse_moe.gate.weight"} | {
        ("mlp", ours): f"{name}.{theirs}.weight" for ours, theirs in parts
    }


def _shared(name: str) -> dict[tuple[str, ...], str]:
    return {("mlp", "shared", part): f"mlp.{name}.{part}_proj.weight" for part in _PROJECTIONS}


def _columns(name: str, *parts: str) -> dict[tuple[str, ...], str]:
    """Matrices and biases that lie column by column in one tensor."""
    places = {part: f"[{{expert}},{at}:{len(parts)}]" for at, part in enumerate(parts)}
    matrices = {("mlp", part): f"{name}{place}" for part, place in places.items()}
    return matrices | {("mlp", f"{part}_bias"): f"{name}_bias{place}" for part, place in places.items()}


_PLAIN = {"qk_norm": "none", "attention_bias": False}
_BIASED = {"qk_norm": "none", "attention_bias": True}
_NO_BIAS = {"attention_bias": False, "use_sliding_window": False}
_WIDTH_IS_EXPERTS = {
    "num_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "intermediate_size",
}
_QWEN_EXPERTS = _same(
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"
)
_GATED_SHARED = {**_shared("shared_expert"), ("mlp", "shared_gate"): "mlp.shared_expert_gate.weight"}
_DELTA = {**_PLAIN, "qk_norm": "head", "norm_offset": True, "attn_output_gate": True, "shared_expert_gate": True}
_DELTA_FIELDS = {
    **_same("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    **_same("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    **_same("linear_conv_kernel_dim"),
}
_MULTIPLIERS = _same("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


def _norms(**names: str) -> dict[tuple[str, ...], str]:
    return {(place, "scale"): f"{name}_layernorm.weight" for place, name in names.items()}


_LATENT = {"qk_norm": "none", "attention_bias": False}
_LATENT_FIELDS = {
    **_same("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"),
    **_same("num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor"),
    "num_experts": "n_routed_experts",
}
_LATENT_TENSORS = {
    **{("attention", part): f"self_attn.{part}_proj.weight" for part in ("q_a", "q_b", "kv_b")},
    ("attention", "kv_a"): "self_attn.kv_a_proj_with_mqa.weight",
    **{("attention", f"{part}_norm", "scale"): f"self_attn.{part}_layernorm.weight" for part in ("q_a", "kv_a")},
}
_NO_AUX = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_SIGMOID_GATE = {"scoring_func": "sigmoid", "selection_bias": True}
_BIASED_GATE = {**_shared("shared_experts"), ("mlp", "router_bias"): "mlp.gate.e_score_correction_bias"}

FAMILIES: Mapping[str, Family] = {
    "qwen3": Family("Qwen3ForCausalLM", {**_PLAIN, "qk_norm": "head"}, computed=_NO_BIAS, head_dim="required"),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**_PLAIN, "qk_norm": "head"},
        _QWEN_EXPERTS,
        qwen_layers,
        written_qwen_layers,
        computed=_NO_BIAS,
        head_dim="required",
    ),
    "llama": Family("LlamaForCausalLM", _PLAIN),
    "qwen2": Family("Qwen2ForCausalLM", _BIASED),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {**_PLAIN, "qk_norm": "full"},
        {**_WIDTH_IS_EXPERTS, "num_experts": "num_experts", "norm_topk_prob": "norm_topk_prob"},
    ),
    "mixtral": Family("MixtralForCausalLM", _PLAIN, _WIDTH_IS_EXPERTS, window=None, expert_tensors=_mixtral_tensors()),
    # Without a window it computes what llama does.
    "mistral": Family("MistralForCausalLM", _PLAIN, window=4096, full_every=0),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {"qk_norm": "none", "shared_expert_gate": True},
        {**_QWEN_EXPERTS, **_same("shared_expert_intermediate_size")},
        lambda published: {**qwen_layers(published), "attention_bias": published.get("qkv_bias", True)},
        lambda config: {**written_qwen_layers(config), "qkv_bias": config.attention_bias},
        computed={"use_sliding_window": False},
        expert_tensors=_GATED_SHARED,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _DELTA,
        {**_DELTA_FIELDS, **_same("norm_topk_prob", "decoder_sparse_step")},
        delta_layers,
        written_delta_layers,
        computed=_NO_BIAS,
        head_dim="required",
        rotary=0.25,
        tensors=grouped_delta_tensors,
        expert_tensors=_GATED_SHARED,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        _DELTA,
        {"intermediate_size": "moe_intermediate_size", **_DELTA_FIELDS},  # no layer is dense
        delta_layers,
        written_delta_layers,
        computed={**_NO_BIAS, "attn_output_gate": True},
        head_dim="required",
        rotary=0.25,
        tensors=delta_tensors,
        expert_tensors=_GATED_SHARED,
    ),
    "granite": Family("GraniteForCausalLM", _PLAIN, _MULTIPLIERS),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        _PLAIN,
        {**_MULTIPLIERS, **_WIDTH_IS_EXPERTS},
        expert_tensors={
            ("mlp", "router"): "block_sparse_moe.router.layer.weight",
            ("mlp", "gate"): "block_sparse_moe.input_linear.weight[{expert},0/2]",
            ("mlp", "up"): "block_sparse_moe.input_linear.weight[{expert},1/2]",
            ("mlp", "down"): "block_sparse_moe.output_linear.weight[{expert},0/1]",
        },
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        _SIGMOID_GATE,
        {
            **_same("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "attention_bias"),
            **_same("n_group", "topk_group", "routed_scaling_factor"),
            "num_experts": "n_routed_experts",
        },
        glm_layers,
        written_glm_layers,
        computed=_NO_AUX,
        rotary=0.5,
        expert_tensors=_BIASED_GATE,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {**_LATENT, "norm_topk_prob": False},
        _LATENT_FIELDS,
        v2_layers,
        written_v2_layers,
        computed={"scoring_func": "softmax", "moe_layer_freq": 1, "norm_topk_prob": False, "rope_interleave": True},
        head_dim="parts",
        tensors=_LATENT_TENSORS,
        expert_tensors=_shared("shared_experts"),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {**_LATENT, **_SIGMOID_GATE},
        {**_LATENT_FIELDS, **_same("n_group", "topk_group", "norm_topk_prob")},
        latent_layers,
        written_latent_layers,
        computed={**_NO_AUX, "moe_layer_freq": 1},
        head_dim="parts",
        tensors=_LATENT_TENSORS,
        expert_tensors=_BIASED_GATE,
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        {**_LATENT, **_SIGMOID_GATE},
        {**_LATENT_FIELDS, **_same("n_group", "topk_group", "norm_topk_prob")},
        latent_layers,
        lambda config: {
            **written_latent_layers(config),
            "mlp_layer_types": ["sparse" if kind == "moe" else "dense" for kind in config.kinds],
        },
        computed=_NO_AUX,
        head_dim="parts",
        tensors=_LATENT_TENSORS,
        expert_tensors=_BIASED_GATE,
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        {**_PLAIN, "qk_norm": "full", **_SIGMOID_GATE},
        _WIDTH_IS_EXPERTS,
        minimax_rotary,
        lambda config: {"rotary_dim": config.rotary_dim},
        computed={
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0,
        },
        rotary=1.0,
        expert_tensors={
            **_mixtral_tensors(),
            ("mlp", "router_bias"): "block_sparse_moe.e_score_correction_bias",
        },
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        {**_PLAIN, "selection_bias": True, "rope_interleave": True},
        {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k", **_same("moe_intermediate_size")},
        ernie_layers,
        written_ernie_layers,
        computed={"use_bias": False, "moe_norm_min": 1e-12},
        tied=True,
        expert_tensors={
            **_shared("shared_experts"),
            ("mlp", "router_bias"): "mlp.moe_statics.e_score_correction_bias[0]",
        },
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _PLAIN,
        read=smollm_layers,
        write=lambda config: {
            "no_rope_layers": [int(layer not in config.no_rope_layers) for layer in range(config.num_hidden_layers)]
        },
        computed={"use_sliding_window": False},
        tied=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **_PLAIN,
            "qk_norm": "head",
            "norm_offset": True,
            "norm_placement": "sandwich",
            "hidden_act": "gelu_tanh",
        },
        read=gemma_scales,
        write=written_gemma_scales,
        computed={
            **dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        window=4096,
        full_every=6,
        sliding_theta=10_000.0,
        local=True,
        tied=True,
        tensors=_norms(
            mlp_norm="pre_feedforward",
            attention_post_norm="post_attention",
            mlp_post_norm="post_feedforward",
        ),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {**_PLAIN, "qk_norm": "full", "norm_placement": "post"},
        window=4096,
        full_every=4,
        sliding_theta=500_000.0,
        tensors=_norms(attention_post_norm="post_attention", mlp_post_norm="post_feedforward"),
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        {"qk_norm": "none", "norm_placement": "sandwich", "rope_interleave": True},
        _same("attention_bias"),
        rotary=0.5,
        tensors={
            **_norms(attention_post_norm="post_self_attn", mlp_post_norm="post_mlp"),
            ("mlp", "gate"): "mlp.gate_up_proj.weight[0/2]",
            ("mlp", "up"): "mlp.gate_up_proj.weight[1/2]",
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            **_BIASED,
            **dict.fromkeys(("attention_output_bias", "attention_sinks", "expert_bias"), True),
        },
        _WIDTH_IS_EXPERTS,
        lambda published: {"swiglu_limit": float(required(published, "swiglu_limit"))},
        lambda config: {"swiglu_limit": config.swiglu_limit},
        computed={"attention_bias": True, "swiglu_alpha": 1.702},
        window=128,
        full_every=2,
        scaled=True,
        quantised="mxfp4",
        expert_tensors={
            ("mlp", "router"): "mlp.router.weight",
            ("mlp", "router_logit_bias"): "mlp.router.bias",
            **_columns("mlp.experts.gate_up_proj", "gate", "up"),
            **_columns("mlp.experts.down_proj", "down"),
        },
    ),
}
