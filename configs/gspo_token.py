"""GSPO-token: GSPO's ratio with a separate gradient for every token (arXiv 2507.18071, section 4.3).

Command:  python -m jaxrl_llm.main --config configs/gspo_token.py --workdir runs/gspo_token
Minutes:  about 2 on two CPU cores; :smoke under one
Expect:   reward/mean from about 0.7 to about 0.9
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "gspo_token"
    config.objective.clip_low = 8e-3  # as in gspo.py
    config.objective.clip_high = 1e-2
    return config
