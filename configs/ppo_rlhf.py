"""RLHF with PPO: rewards of a reward model, KL to the start inside the reward, a critic of its own (arXiv 2203.02155).

Command:  python -m jaxrl_llm.main --config configs/reward_model.py --workdir runs/reward_model
          python -m jaxrl_llm.main --config configs/ppo_rlhf.py --workdir runs/ppo_rlhf
          (another model: --config.rewards.reward_model=DIR)
Minutes:  about 1.5 on one CPU core, after 1.5 for the reward model; :smoke under one, on a random reward model
Expect:   eval/greedy from 0.73 to about 0.80 and sampled from 0.63 to 0.73 at kl/ref_answer 0.5, in one run. The
          verifier gives them and nothing learns from it: watch them beside reward/reward_model. With a beta of 0.05,
          steered to a KL of 2 nats, they fell to 0.59 and 0.52 while the model's score rose: over-optimisation
"""

from ml_collections import ConfigDict

from configs import base, stand_ins


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.rewards.verifier_weight = 0.0
    config.rewards.reward_model = "runs/reward_model"
    config.rewards.missing_eos_penalty = 5.0  # the model knows whole answers only; see docs/preferences.md
    config.objective.name = "ppo"
    config.objective.lam = 0.95
    config.objective.reward_kl_coef = 0.2
    config.critic.kind = "separate"
    config.critic.warmup_steps = 2
    if variant == "smoke":
        config.critic.warmup_steps = 1
        config.rewards.reward_model = stand_ins.reward_model(config.to_dict())
    return config
