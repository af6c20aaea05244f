"""DAPO: clip-higher, token-level loss, dynamic sampling and overlong shaping (arXiv 2503.14476).

Command:  python -m jaxrl_llm.main --config configs/dapo.py --workdir runs/dapo
Minutes:  about 2 on two CPU cores; :smoke under one
Expect:   reward/mean from about 0.7 to about 0.9; rollout/groups_generated above groups_kept
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "dapo"
    config.dynamic_sampling.max_draws = 4
    config.rewards.overlong_cache = 0 if variant == "smoke" else 1  # every right answer has one length here
    config.rewards.overlong_filter = True
    if variant != "smoke":
        config.rollout.max_new_tokens = 14  # room for the ramp above the 11 tokens of a right answer
    return config
