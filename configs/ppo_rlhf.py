"""RLHF with PPO: rewards of a reward model, KL to the start inside the reward, a critic of its own (arXiv 2203.02155).

Command:  python -m jaxrl_llm.main --config configs/reward_model.py --workdir runs/reward_model
          python -m jaxrl_llm.main --config configs/ppo_rlhf.py --workdir runs/ppo_rlhf
          (another model: --config.rewards.reward_model=DIR)
Minutes:  :smoke about 1.5 on a busy core, on a random reward model of its own; the whole run is not timed yet
Expect:   not measured yet. Watch reward/reward_model beside reward/mean and eval/greedy, which the verifier gives and
          nothing learns from, and whether kl/ref_answer settles at objective.kl_target
"""

from ml_collections import ConfigDict

from configs import base
from jaxrl_llm import stand_ins


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.rewards.verifier_weight = 0.0
    config.rewards.reward_model = "runs/reward_model"
    config.rewards.missing_eos_penalty = 5.0  # the model knows whole answers only; see docs/preferences.md
    config.objective.name = "ppo"
    config.objective.lam = 0.95
    config.objective.reward_kl_coef = 0.05
    config.objective.kl_target = 2.0  # nats an answer
    config.critic.kind = "separate"
    config.critic.warmup_steps = 2
    if variant == "smoke":
        config.critic.warmup_steps = 1
        config.rewards.reward_model = stand_ins.reward_model(config.to_dict())
    return config
