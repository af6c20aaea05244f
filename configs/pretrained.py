"""GRPO from a published checkpoint: every size of the model is the checkpoint's. The task must speak its tokenizer.

Command:  python -m jaxrl_llm.main --config configs/pretrained.py --config.model.pretrained=PATH --workdir DIR
          with the task and the lengths of the answers as further flags

For a run that is to be planned or tried before the checkpoint is fetched, write a config that holds its sizes in the
fields of `model` and sets `model.pretrained` beside them: a checkpoint that contradicts them is an error.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import base

_ARCHITECTURE = {
    int: (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "decoder_sparse_step",
    ),
    bool: ("norm_topk_prob", "attention_bias", "tie_word_embeddings"),
    tuple: ("mlp_only_layers", "rope_scaling"),
    float: ("rope_theta", "rms_norm_eps"),
    str: ("qk_norm", "param_dtype", "dtype"),
}


def get_config(variant: str = "") -> ConfigDict:
    if variant:
        raise ValueError(f"unknown variant {variant!r}; this config has none")
    config = base.get_config()
    model: Any = config.model
    for kind, names in _ARCHITECTURE.items():
        for name in names:
            del model[name]  # a field keeps its type, and takes None only as a placeholder
            model[name] = placeholder(kind)
    model.remat = "block"
    config.warm_start.steps = 0
    config.optimizer.learning_rate = 1e-6
    return config
