"""RSPO: token ratios weighed down where the router has moved away from the old policy
(arXiv 2510.23027).

Command:  python -m jaxrl_llm.main --config configs/rspo.py --workdir runs/rspo
Minutes:  about 1 on two CPU cores (36 s beside other work, from a cached warm start); :smoke half of it
Expect:   reward/mean from about 0.7 to about 0.9, held-out greedy from 0.79 to 0.91; under 1 % of tokens clipped
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "rspo"
    return config
