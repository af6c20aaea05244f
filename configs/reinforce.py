"""REINFORCE with a group baseline: no ratio, so each rollout is used for one update (Williams 1992).

Command:  python -m jaxrl_llm.main --config configs/reinforce.py --workdir runs/reinforce
Minutes:  about 1 on two CPU cores (39 s beside other work, from a cached warm start); :smoke half of it
Expect:   reward/mean from about 0.7 to about 0.9, held-out greedy from 0.79 to 0.91; no ratio, so nothing is clipped
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "reinforce"
    config.updates.minibatches = 1  # without a ratio a second update would use the gradient of an older policy
    config.optimizer.learning_rate = 4e-4  # a quarter of the updates
    return config
