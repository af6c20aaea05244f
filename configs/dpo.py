"""DPO on pairs of the task: a right answer preferred to a wrong one.

Command:  python -m jaxrl_llm.main --config configs/dpo.py --workdir runs/dpo
Minutes:  1.2 on two CPU cores that other work shared
Expect:   loss/pairs starts at log 2 and pairs/margin grows; in one run eval/greedy went from 0.734 to 0.797, sampled
          from 0.629 to 0.668 (0.695 at step 40). Watch them and pairs/logprob_chosen: a larger rate or more steps may
          lower all three
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "dpo"
    config.rollout.prompts = 64  # pairs a step
    config.rollout.group_size = 2
    config.updates.minibatches = 1
    config.updates.shuffle = "groups"
    config.optimizer.learning_rate = 1e-5
    if variant == "smoke":
        config.rollout.prompts = 8
    return config
