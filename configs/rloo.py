"""RLOO: leave-one-out baseline, no standard deviation (arXiv 2402.14740).

Command:  python -m jaxrl_llm.main --config configs/rloo.py --workdir runs/rloo
Minutes:  about 2 on two CPU cores; :smoke under one
Expect:   reward/mean from about 0.7 to about 0.9
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "rloo"
    config.optimizer.learning_rate = 3e-4  # advantages are about half of GRPO's
    return config
