"""GRPO on GSM8K from Qwen3-0.6B: answers of up to 1024 tokens, without its thinking mode.

Command:  python -m jaxrl_llm.main --config configs/qwen3_0_6b_gsm8k_grpo.py --workdir DIR
          --config.model.pretrained=PATH, the folder of the published checkpoint
Memory:   estimated from its sizes 29.2 GB on one GPU: parameters 2.4, optimizer 4.8; a rollout 20.7, of
          which the cache of 128 slots is 19.2; an update 10.2; an evaluation 22.1. 18.8 GB with rollout.slots=64, for
          24 GB.
          Compiled for one H100 (`plan --topology h100:1`, jax 0.10.2, jax-cuda13-plugin): a rollout 22.9 GB, scoring
          5.9, an update 16.1, each with its arguments; an update at least 0.91 s, a decode step of 128 slots 6.8 ms
Minutes:  not measured on an accelerator; :smoke under one on two CPU cores
Expect:   :smoke trains a random tiny checkpoint on sums that read like GSM8K, and downloads nothing

The fields of `model` are those of the published config.json (arXiv 2505.09388), so that the run can be planned without
it; a checkpoint that contradicts them is an error.
"""

from ml_collections import ConfigDict

from configs import base, pretrained


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "smoke"):
        raise ValueError(f"unknown variant {variant!r}; this config has 'smoke' or none")
    config = base.get_config()
    set_qwen3(config)
    config.model.num_hidden_layers = 28
    config.model.hidden_size = 1024
    config.model.intermediate_size = 3072
    config.model.num_attention_heads = 16
    config.model.num_key_value_heads = 8
    config.model.num_experts = 0
    config.model.tie_word_embeddings = True

    set_gsm8k(config)
    config.steps = 200
    config.rollout.prompts = 64
    config.rollout.group_size = 8
    config.rollout.slots = 128
    config.rollout.mesh_shape = (
        -1,
        1,
        1,
        1,
    )  # a copy on each device: no token gathers slices
    config.updates.minibatches = 4
    config.updates.micro_batch_rows = 16
    config.updates.length_buckets = 4
    config.objective.name = "grpo"
    if variant == "smoke":
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
        return pretrained.on_stand_ins(config, sizes | {"num_attention_heads": 4, "num_key_value_heads": 2})
    return config


def set_qwen3(config: ConfigDict) -> None:
    """Set what every Qwen3 has, and its types: float32 parameters for the optimizer, bfloat16 for all else."""
    config.model.vocab_size = 151_936
    config.model.head_dim = 128
    config.model.rope_theta = 1_000_000.0
    config.model.rms_norm_eps = 1e-6
    config.model.param_dtype = "float32"
    config.model.dtype = "bfloat16"
    config.model.remat = "block"
    config.rollout.dtype = "bfloat16"


def set_gsm8k(config: ConfigDict) -> None:
    """The task as a chat, and what training on it has in common."""
    config.task.name = "gsm8k"
    config.task.options = ConfigDict({"prompt_length": 256, "answer_length": 1024})
    config.task.chat = True
    config.task.chat_options = ConfigDict({"enable_thinking": False})
    config.task.template = "{prompt}\nReason step by step and end with the answer as a number."
    config.rollout.prompt_buckets = 4
    config.warm_start.steps = 0
    config.optimizer.learning_rate = 1e-6
    config.evaluation.prompts = 256
    config.evaluation.samples = 1
    config.log.diagnostics_every = 0
