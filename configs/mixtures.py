"""GSPO on GSM8K from a published mixture whose gate is not that of Qwen3-MoE; the variant names the model.

Command:  python -m jaxrl_llm.main --config mixtures:glm_4_5_air --workdir DIR
          --config.model.pretrained=PATH, the folder of the published checkpoint, on 32 devices; or
          granite_1b_a400m, qwen1_5_moe_a2_7b, gpt_oss_20b, deepseek_v2_lite, moonlight or ernie_4_5_21b_a3b, on 8;
          glm_4_7_flash, on 16; qwen3_5_35b_a3b or qwen3_next_80b_a3b, on 64; minimax_m2, of a bfloat16 copy, on 128
Minutes:  not measured on accelerators; :smoke under one on two CPU cores
Expect:   :smoke trains a random tiny mixture with the gate of GLM-4.5 on sums that read like GSM8K, without a download

The fields of `model` are those of the published config.json, so that a run can be planned without it; a checkpoint that
contradicts them is an error. Without a variant the model is granite_1b_a400m.
"""

import math
from typing import Any

from ml_collections import ConfigDict

from configs import base, pretrained
from configs.qwen3_0_6b_gsm8k_grpo import set_gsm8k

_GRANITE = {
    "vocab_size": 49_155,
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "qk_norm": "none",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 6.0,
}
_QWEN = {
    "vocab_size": 151_936,
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": 5632,
    "shared_expert_gate": True,
    "qk_norm": "none",
    "attention_bias": True,
    "rope_theta": 1_000_000.0,
}
_SIGMOID = {"scoring_func": "sigmoid", "selection_bias": True, "partial_rotary_factor": 0.5}
_GLM = _SIGMOID | {
    "vocab_size": 151_552,
    "num_hidden_layers": 46,
    "hidden_size": 4096,
    "intermediate_size": 10_944,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "mlp_only_layers": (0,),
    "shared_expert_intermediate_size": 1408,
    "qk_norm": "none",
    "attention_bias": True,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-5,
}
_MINIMAX = _SIGMOID | {
    "vocab_size": 200_064,
    "num_hidden_layers": 62,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "qk_norm": "full",
    "rope_theta": 5_000_000.0,
}
_GPT_OSS = {
    "vocab_size": 201_088,
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2880,
    "expert_bias": True,
    "swiglu_limit": 7.0,
    "qk_norm": "none",
    "attention_bias": True,
    "attention_output_bias": True,
    "attention_sinks": True,
    "sliding_window": 128,
    "layer_types": ("sliding_attention", "full_attention") * 12,
    "rope_theta": 150_000.0,
    "rope_type": "yarn",
    "rope_scaling": (32.0, 4096.0, 32.0, 1.0, 0.0, 0.0),
    "rms_norm_eps": 1e-5,
}
_LATENT = {
    "hidden_size": 2048,
    "num_experts": 64,
    "mlp_only_layers": (0,),
    "qk_norm": "none",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
}
_DEEPSEEK = _LATENT | {
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 2816,
    "head_dim": 192,
    "v_head_dim": 128,
}
_V2_LITE = _DEEPSEEK | {
    "vocab_size": 102_400,
    "intermediate_size": 10_944,
    "norm_topk_prob": False,
    "attention_multiplier": 192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2,
    "rope_theta": 10_000.0,
    "rope_type": "yarn",
    "rope_scaling": (40.0, 4096.0, 32.0, 1.0, 1.0, 1.0),
}
_BIASED = {"scoring_func": "sigmoid", "selection_bias": True, "rms_norm_eps": 1e-5}
_MOONLIGHT = _DEEPSEEK | {
    **_BIASED,
    "vocab_size": 163_840,
    "intermediate_size": 11_264,
    "routed_scaling_factor": 2.446,
    "rope_theta": 50_000.0,
}
_GLM_FLASH = _LATENT | {
    **_BIASED,
    "vocab_size": 154_880,
    "num_hidden_layers": 47,
    "intermediate_size": 10_240,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "shared_expert_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "q_lora_rank": 768,
    "head_dim": 256,
    "v_head_dim": 256,
    "rope_theta": 1_000_000.0,
}
_QWEN3_5 = {
    "vocab_size": 248_320,
    "num_hidden_layers": 40,
    "hidden_size": 2048,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "shared_expert_gate": True,
    "attn_output_gate": True,
    "norm_offset": True,
    "layer_types": (*["linear_attention"] * 3, "full_attention") * 10,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10_000_000.0,
}
_QWEN3_NEXT = _QWEN3_5 | {
    "vocab_size": 151_936,
    "num_hidden_layers": 48,
    "intermediate_size": 5120,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "layer_types": (*["linear_attention"] * 3, "full_attention") * 12,
}
_ERNIE = {
    "vocab_size": 103_424,
    "num_hidden_layers": 28,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1536,
    "mlp_only_layers": (0,),
    "selection_bias": True,
    "shared_expert_intermediate_size": 3072,
    "qk_norm": "none",
    "rope_interleave": True,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_ON_ONE_NODE, _ON_NODES = (1, 4, 2, 1), (1, -1, 8, 1)
_MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "granite_1b_a400m": (_GRANITE, _ON_ONE_NODE),
    "qwen1_5_moe_a2_7b": (_QWEN, (1, 2, 4, 1)),
    "gpt_oss_20b": (_GPT_OSS, _ON_ONE_NODE),
    "deepseek_v2_lite": (_V2_LITE, _ON_ONE_NODE),
    "moonlight": (_MOONLIGHT, _ON_ONE_NODE),
    "glm_4_7_flash": (_GLM_FLASH, _ON_NODES),
    "ernie_4_5_21b_a3b": (_ERNIE, _ON_ONE_NODE),
    "glm_4_5_air": (_GLM, _ON_NODES),
    "minimax_m2": (_MINIMAX, _ON_NODES),
    "qwen3_5_35b_a3b": (_QWEN3_5, _ON_NODES),
    "qwen3_next_80b_a3b": (_QWEN3_NEXT, _ON_NODES),
}
_TINY = _SIGMOID | {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": (0,),
    "shared_expert_intermediate_size": 16,
    "param_dtype": "float32",
    "dtype": "float32",
}


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "smoke", *_MODELS):
        raise ValueError(
            f"unknown variant {variant!r}; this config has 'smoke', {', '.join(map(repr, _MODELS))} or none"
        )
    sizes, mesh = _MODELS["glm_4_5_air" if variant == "smoke" else variant or "granite_1b_a400m"]
    config = of_sizes(sizes, micro_batch_rows=256)
    config.objective.name = "gspo"
    config.replay.mode = "R3"
    config.mesh.shape = mesh
    if variant == "smoke":
        return pretrained.on_stand_ins(config, _TINY)
    return config


def of_sizes(sizes: dict[str, Any], micro_batch_rows: int) -> ConfigDict:
    """The task and the batch of a published model of these fields."""
    config = base.get_config()
    model: Any = config.model
    for name, value in sizes.items():
        model[name] = value
    config.model.dtype = "bfloat16"
    config.model.remat = "block"
    config.rollout.dtype = "bfloat16"
    set_gsm8k(config)
    config.steps = 200
    config.rollout.prompts = 64
    config.rollout.group_size = 16
    config.rollout.slots = 512
    config.updates.minibatches = 4
    config.updates.micro_batch_rows = micro_batch_rows
    config.updates.length_buckets = 4
    return config
