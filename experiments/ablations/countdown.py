"""The setting of three ablations: countdown, where answers differ in length and several are right.

Command:  python -m jaxrl_llm.main --config experiments/ablations/countdown.py --workdir runs/countdown
Minutes:  about 1 on one CPU core
Expect:   held-out pass@1 from about 0.14 to about 0.28 in 60 rollouts of N = 8 updates each
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# A ConfigDict is dynamic; `validate()` checks its fields.

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.task.name = "countdown"
    config.task.options = ConfigDict({"numbers": 3, "maximum": 20})
    config.objective.name = "grpo"
    config.optimizer.learning_rate = 3e-4
    if variant != "smoke":
        config.warm_start.steps = 300
        config.updates.minibatches = 8
        config.steps = 60
        config.evaluation.every = 60
        config.evaluation.prompts = 256
        config.checkpoint.every = 60
        config.log.diagnostics_every = 0
    return config
