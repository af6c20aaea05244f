"""One tiny mixture of experts and four prompts of different lengths, shared by every test of the rollout."""

import numpy as np

from jaxrl_llm.models import ModelConfig

VOCABULARY = 16
PROMPTS = np.random.default_rng(0).integers(0, VOCABULARY, (4, 5)).astype(np.int32)
LENGTHS = np.array([4, 2, 5, 1], np.int32)
PROMPTS[np.arange(5)[None] >= LENGTHS[:, None]] = 0
UIDS = np.array([7, 3, 11, 5], np.int32)


def tiny(**changes) -> ModelConfig:
    fields = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "experts_implementation": "dense",
    }
    return ModelConfig(**(fields | changes))
