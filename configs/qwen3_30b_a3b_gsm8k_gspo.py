"""GSPO on GSM8K from Qwen3-30B-A3B, a mixture of 128 experts of which 8 act on a token: 3.3 of 30.5 B parameters.

Command:  python -m jaxrl_llm.main --config configs/qwen3_30b_a3b_gsm8k_gspo.py --workdir DIR
          --config.model.pretrained=PATH, the folder of the published checkpoint, on 32 devices
Memory:   estimated from its sizes 29.2 GB on each of 32 GPUs: parameters 3.8, optimizer 7.6;
          a rollout 17.8, of which its weights are 15.3 and the cache of 512 slots 2.0; an update 9.7.
          Compiled for 32 H100 at full depth (`plan --topology h100:32`, jax 0.10.2, jax-cuda13-plugin): an update 27
          GB with its arguments, and at least 0.56 s, bound by the network between its four nodes (0.45 s by the
          memory); a rollout 18 GB, a decode step of 512 slots at least 5.7 ms, bound by the memory
Minutes:  not measured on accelerators; :smoke under one on two CPU cores
Expect:   :smoke trains a random tiny mixture of experts on sums that read like GSM8K, and downloads nothing

The fields of `model` are those of the published config.json (arXiv 2505.09388), so that the run can be planned without
it; a checkpoint that contradicts them is an error.
"""

from ml_collections import ConfigDict

from configs import base, pretrained
from configs.qwen3_0_6b_gsm8k_grpo import set_gsm8k, set_qwen3


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "smoke"):
        raise ValueError(f"unknown variant {variant!r}; this config has 'smoke' or none")
    config = base.get_config()
    set_qwen3(config)
    config.model.num_hidden_layers = 48
    config.model.hidden_size = 2048
    config.model.intermediate_size = 6144  # no layer is dense, but the published file has the field
    config.model.num_attention_heads = 32
    config.model.num_key_value_heads = 4
    config.model.num_experts = 128
    config.model.num_experts_per_tok = 8
    config.model.moe_intermediate_size = 768
    config.model.tie_word_embeddings = False

    set_gsm8k(config)
    config.steps = 200
    config.rollout.prompts = 64
    config.rollout.group_size = 16
    config.rollout.slots = 512
    config.updates.minibatches = 4
    config.updates.micro_batch_rows = 256  # a minibatch at once: each micro-batch gathers the weights between nodes
    config.updates.length_buckets = 4
    config.objective.name = "gspo"  # with the recipe's clips, 3e-4 and 4e-4, the paper's for answers of this length
    config.replay.mode = "off"  # a ratio of sequences does not need it (arXiv 2507.18071, section 5.3); R3 if wanted
    config.mesh.shape = (1, 4, 8, 1)  # tokens move to their experts inside a node
    config.rollout.mesh_shape = (-1, 1, 1, 4)  # copies, each over 4 GPUs of a node: no token gathers weights
    if variant == "smoke":
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        return pretrained.on_stand_ins(config, sizes)
    return config
