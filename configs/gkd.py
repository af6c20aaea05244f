"""On-policy distillation by the exact reverse KL to a teacher over the vocabulary, on the policy's own answers (GKD).

Command:  python -m jaxrl_llm.main --config sft --workdir runs/teacher --config.steps=600
          python -m jaxrl_llm.main --config gkd --workdir runs/gkd
Minutes:  about 1 each on two CPU cores
Expect:   loss/teacher, the KL in nats a token, falls (docs/distillation.md)
"""

from ml_collections import ConfigDict

from configs import distill


def get_config(variant: str = "") -> ConfigDict:
    config = distill.get_config(variant)
    config.objective.advantage = "none"  # rewards are logged and not learnt
    config.objective.teacher_coef = 1.0
    return config
