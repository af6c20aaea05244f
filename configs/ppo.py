"""PPO: a value function on the policy, GAE and a clipped value loss (arXiv 1707.06347, 2203.02155).

Command:  python -m jaxrl_llm.main --config configs/ppo.py --workdir runs/ppo
Minutes:  about 2 on two CPU cores; :smoke under one
Expect:   reward/mean from about 0.7 to about 0.9
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "ppo"
    config.critic.kind = "head"
    config.objective.value_coef = 0.1  # the head shares the policy's trunk
    return config
