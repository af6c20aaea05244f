"""GRPO from a published checkpoint: every size of the model is taken from it, and the task uses its tokenizer.

Command:  python -m jaxrl_llm.main --config configs/pretrained.py --config.model.pretrained=PATH --workdir DIR
          with the task and the lengths of the answers as further flags; PATH may be a name on the hub: Qwen/Qwen3-0.6B
Minutes:  those of the model; :smoke under one on two CPU cores
Types:    what is trained is float32, what is frozen (LoRA's base, the reference) and the computation as in the file
Expect:   :smoke trains a random tiny checkpoint on sums that read like GSM8K, and downloads nothing

To plan or try a run without the checkpoint's files, write a config with its sizes in the fields of `model`, as
qwen3_0_6b_gsm8k_grpo.py does: a checkpoint that contradicts them is an error.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import base, stand_ins
from jaxrl_llm.ground.declared import declarations
from jaxrl_llm.models import ModelConfig

_OF_THE_RUN = ("numerics", "remat", "experts_implementation", "attention_implementation")


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "smoke"):
        raise ValueError(f"unknown variant {variant!r}; this config has 'smoke' or none")
    config = base.get_config()
    model: Any = config.model
    for name, declared in declarations(ModelConfig).items():
        if name not in _OF_THE_RUN:
            del model[name]  # a field keeps its type, and takes None only as a placeholder
            model[name] = placeholder(declared.kind)
    model.remat = "block"
    config.warm_start.steps = 0
    config.optimizer.learning_rate = 1e-6
    return on_stand_ins(config, _TINY) if variant == "smoke" else config


_TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "qk_norm": "head",
    "param_dtype": "float32",
    "dtype": "float32",
}


def on_stand_ins(config: Any, sizes: dict[str, Any]) -> ConfigDict:
    """The whole run in its smallest form: GSM8K and a checkpoint of `sizes`, both generated locally."""
    smoke: Any = base.smoke(base.get_config())
    for block in ("rollout", "updates", "evaluation", "checkpoint", "log"):
        for field in ("prompts", "group_size", "minibatches", "every", "samples", "diagnostics_every"):
            if field in smoke[block]:
                config[block][field] = smoke[block][field]
    config.steps = smoke.steps
    config.task.name = "gsm8k"
    config.task.options = ConfigDict({"folder": stand_ins.gsm8k(), "prompt_length": 96, "answer_length": 4})
    config.rollout.slots = 8
    config.updates.micro_batch_rows = 0
    config.warm_start.steps = 30  # a policy that is sometimes right: without rewards nothing would be learned
    config.warm_start.learning_rate = 1e-2
    config.mesh.shape, config.rollout.mesh_shape = (1, 1, 1, 1), ()
    given = {name: value for name, value in config.model.items() if value is not None} | sizes
    config.model.vocab_size = None  # the tokenizer's
    for name, value in sizes.items():
        config.model[name] = value
    config.model.pretrained = stand_ins.checkpoint(given)
    return config
