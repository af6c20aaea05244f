"""The regime of the routing-replay study: a policy whose experts change as often as published (~10 % in a rollout).

Command:  python -m jaxrl_llm.main --config configs/routing_replay.py --workdir runs/rr
Minutes:  about 1 on one CPU core; :smoke under one
Expect:   with GRPO reward/mean falls from about 0.7 within 30 rollouts of N = 32 updates each, and
          routing/flips_old_current reaches 5 to 10 % by the last update of a rollout

Sixteen experts of which four are active, thirty-two updates of eight answers per rollout, and a learning rate at which
the objectives differ. experiments/routing_replay/ compares them in pairs.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.objective.name = "grpo"
    config.model.num_experts_per_tok = 4 if variant != "smoke" else 2
    config.optimizer.learning_rate = 4e-4
    config.optimizer.clip_norm = 1.0
    if variant != "smoke":
        config.steps = 30
        config.model.num_hidden_layers = 4
        config.model.num_experts = 16
        config.model.moe_intermediate_size = 16
        config.warm_start.steps = 200
        config.updates.minibatches = 32
        config.evaluation.every = 30
        config.evaluation.prompts = 256
        config.checkpoint.every = 30
    return config
