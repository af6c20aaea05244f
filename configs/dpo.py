"""DPO on pairs of the task: a right answer preferred to a wrong one.

Command:  python -m jaxrl_llm.main --config configs/dpo.py --workdir runs/dpo
Minutes:  :smoke takes under a minute on two CPU cores; the whole run was not timed
Expect:   loss/pairs starts at log 2 and pairs/margin grows; whether eval/greedy rises with it depends on whose answers
          the pairs are (experiments/preferences), so watch it and pairs/logprob_chosen
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
