"""GRPO: one importance ratio a token, clipped (arXiv 2402.03300).

Command:  python -m jaxrl_llm.main --config configs/grpo.py --workdir runs/grpo
Minutes:  about 5 on two CPU cores; :smoke under one
Expect:   reward/mean from about 0.6 to above 0.9
"""

from configs import base
from ml_collections import ConfigDict


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "grpo"
    return config
