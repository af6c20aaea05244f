"""On-policy distillation: the advantage of a token is its log-prob under a teacher less the policy's own.

Command:  python -m jaxrl_llm.main --config sft --workdir runs/teacher --config.steps=600
          python -m jaxrl_llm.main --config distill --workdir runs/distill
Minutes:  about 1 each on two CPU cores
Expect:   kl/teacher falls, and held-out accuracy rises towards the teacher's (docs/distillation.md)
"""

from ml_collections import ConfigDict

from configs import base, stand_ins


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.teacher.path = "runs/teacher"
    config.objective.name = "dapo"  # clipped token ratios, a mean over tokens
    config.objective.advantage = "teacher"
    config.model.num_experts = 0  # a small dense student
    config.model.num_hidden_layers = 2
    config.model.hidden_size = 32
    config.model.intermediate_size = 64
    if variant == "smoke":
        config.teacher.path = stand_ins.teacher(config.to_dict())
    return config
