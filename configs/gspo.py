"""GSPO: one length-normalised importance ratio per sequence, clipped (arXiv 2507.18071).

Command:  python -m jaxrl_llm.main --config configs/gspo.py --workdir runs/gspo
Minutes:  about 2 on two CPU cores; :smoke under one
Expect:   reward/mean from about 0.7 to about 0.9, with about 5 % of tokens clipped
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "gspo"
    # The paper's 3e-4 / 4e-4 belong to answers of thousands of tokens; the spread grows with 1/sqrt(length).
    config.objective.clip_low = 8e-3
    config.objective.clip_high = 1e-2
    return config
