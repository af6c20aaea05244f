"""Dr. GRPO: no standard deviation, a constant instead of the length (arXiv 2503.20783).

Command:  python -m jaxrl_llm.main --config configs/dr_grpo.py --workdir runs/dr_grpo
Minutes:  about 2 on two CPU cores; :smoke under one
Expect:   reward/mean from about 0.7 to about 0.9
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "dr_grpo"
    config.optimizer.learning_rate = 3e-4  # advantages are about half of GRPO's
    return config
