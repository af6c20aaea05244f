"""CISPO: a capped, detached ratio weighs log pi (arXiv 2506.13585).

Command:  python -m jaxrl_llm.main --config configs/cispo.py --workdir runs/cispo
Minutes:  about 2 on two CPU cores; :smoke under one
Expect:   reward/mean from about 0.7 to about 0.9
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "cispo"
    return config
