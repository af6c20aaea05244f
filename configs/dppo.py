"""DPPO: a mask by the divergence of the sampled token's probabilities instead of a clip (arXiv 2602.04879).

Command:  python -m jaxrl_llm.main --config configs/dppo.py --workdir runs/dppo
Minutes:  about 2 on two CPU cores; :smoke under one
Expect:   reward/mean from about 0.7 to about 0.9
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "dppo"
    return config
