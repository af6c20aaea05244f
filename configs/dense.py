"""GRPO on GSM8K from a published dense model whose attention or norms are not those of Qwen3; the variant names it.

Command:  python -m jaxrl_llm.main --config dense:smollm3_3b --workdir DIR
          --config.model.pretrained=PATH, the folder of the published checkpoint; or gemma_3_1b, olmo_3_7b or glm_4_9b
          (GLM-4-9B-0414), on 8 devices
Minutes:  not measured on accelerators; :smoke under one on two CPU cores
Expect:   :smoke trains a random tiny model with the layers of SmolLM3 on sums that read like GSM8K, without a download

The fields of `model` are those of the published config.json, so that a run can be planned without it; a checkpoint that
contradicts them is an error. Without a variant the model is smollm3_3b.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import mixtures, pretrained

_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA_3 = {
    "vocab_size": 262_144,
    "num_hidden_layers": 26,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "qk_norm": "head",
    "attention_multiplier": 256**-0.5,
    "embedding_multiplier": 1152**0.5,
    "sliding_window": 512,
    "layer_types": ((*[_SLIDING] * 5, _FULL) * 5)[:26],
    "sliding_rope_theta": 10_000.0,
    "rope_theta": 1_000_000.0,
    "norm_placement": "sandwich",
    "norm_offset": True,
    "hidden_act": "gelu_tanh",
    "tie_word_embeddings": True,
}
_SMOLLM3 = {
    "vocab_size": 128_256,
    "num_hidden_layers": 36,
    "hidden_size": 2048,
    "intermediate_size": 11_008,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "qk_norm": "none",
    "no_rope_layers": tuple(range(3, 36, 4)),
    "rope_theta": 5_000_000.0,
    "tie_word_embeddings": True,
}
_OLMO_3 = {
    "vocab_size": 100_278,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "qk_norm": "full",
    "norm_placement": "post",
    "sliding_window": 4096,
    "layer_types": (*[_SLIDING] * 3, _FULL) * 8,
    "sliding_rope_theta": 500_000.0,
    "rope_theta": 500_000.0,
    "rope_type": "yarn",
    "rope_scaling": (8.0, 8192.0, 32.0, 1.0, 1.2079441541679836, 1.0),
}
_GLM_4 = {
    "vocab_size": 151_552,
    "num_hidden_layers": 40,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "qk_norm": "none",
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_interleave": True,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
    "norm_placement": "sandwich",
}
_MODELS: dict[str, dict[str, Any]] = {
    "gemma_3_1b": _GEMMA_3,
    "smollm3_3b": _SMOLLM3,
    "olmo_3_7b": _OLMO_3,
    "glm_4_9b": _GLM_4,
}
_TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "no_rope_layers": (1,),
    "param_dtype": "float32",
    "dtype": "float32",
}


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "smoke", *_MODELS):
        raise ValueError(
            f"unknown variant {variant!r}; this config has 'smoke', {', '.join(map(repr, _MODELS))} or none"
        )
    sizes = {"num_experts": 0, "rms_norm_eps": 1e-6} | _MODELS.get(variant, _SMOLLM3)
    config = mixtures.of_sizes(sizes, micro_batch_rows=64)
    config.mesh.shape = (1, -1, 1, 1)
    if variant == "smoke":
        return pretrained.on_stand_ins(config, _TINY)
    return config
