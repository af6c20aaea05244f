"""GRPO: one importance ratio per token, clipped (arXiv 2402.03300).

Command:  python -m jaxrl_llm.main --config configs/grpo.py --workdir runs/grpo
Minutes:  about 2 on two CPU cores; :smoke under one
Expect:   reward/mean from about 0.7 to about 0.9
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "grpo"
    return config
