"""VESPO: the product of an answer's token ratios, weighed by a smooth kernel instead of a clip
(arXiv 2602.10693).

Command:  python -m jaxrl_llm.main --config configs/vespo.py --workdir runs/vespo
Minutes:  about 1 on two CPU cores (44 s beside other work, from a cached warm start); :smoke half of it
Expect:   reward/mean from about 0.7 to about 0.9, held-out greedy from 0.79 to 0.88; nothing is clipped
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "vespo"
    return config
