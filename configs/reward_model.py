"""A reward model: the transformer with a scalar head, Bradley-Terry on pairs of the task.

Command:  python -m jaxrl_llm.main --config configs/reward_model.py --workdir runs/reward_model
Minutes:  1.4 on two CPU cores that other work shared
Expect:   eval/pair_accuracy from 0.5 to about 0.98, eval/brier from 0.25 to about 0.02
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "reward_model"
    config.objective.center_rewards_coefficient = 0.01
    config.rollout.prompts = 64  # pairs a step
    config.rollout.group_size = 2
    config.updates.minibatches = 1
    config.updates.shuffle = "groups"
    config.optimizer.learning_rate = 1e-3
    config.steps = 200
    config.evaluation.prompts = 512
    if variant == "smoke":
        config.steps = 6
        config.rollout.prompts = 8
        config.evaluation.prompts = 64
    return config
