"""Runs at the size of published models, only for plans: of the task only the lengths matter."""

import dataclasses
from typing import Any

from configs import gspo
from experiments.performance.accelerator import CASES
from jaxrl_llm.models import ModelConfig
from jaxrl_llm.run.settings import Settings, validate

__all__ = ["MODELS", "WORKLOADS", "Workload", "settings_of"]

_QWEN3 = {"head_dim": 128, "vocab_size": 151_936, "rope_theta": 1e6, "dtype": "bfloat16", "remat": "block"}
# Qwen3, arXiv 2505.09388, and the published config.json of each.
MODELS = {
    "qwen3-8b": ModelConfig(
        num_hidden_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        **_QWEN3,
    ),
    "qwen3-30b-a3b": ModelConfig(
        num_hidden_layers=48,
        hidden_size=2048,
        intermediate_size=6144,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        **_QWEN3,
    ),
    # what `experiments.performance.accelerator` measures
    "qwen3-0.6b": CASES["0.6b"].model,
    "1b-dense": CASES["dense"].model,
    "1b-moe": CASES["moe"].model,
}
_MEASURED = {"rows": 64, "micro_batch_rows": 8, "prompt": 256, "answer": 768, "remat": "none"}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model on a mesh of chips: `rows` answers a step in groups of 8, all in one minibatch, GSPO with R2 on MoE."""

    model: str
    topology: str
    mesh: tuple[int, ...]
    rows: int
    micro_batch_rows: int
    prompt: int = 512
    answer: int = 3584
    remat: str = "block"


WORKLOADS = {
    "30b-v5p": Workload("qwen3-30b-a3b", "v5p:4x4x4", (1, 64, 1, 1), rows=64, micro_batch_rows=64),
    "30b-v5p-expert": Workload("qwen3-30b-a3b", "v5p:4x4x4", (1, 4, 16, 1), rows=64, micro_batch_rows=64),
    "30b-v5p-256": Workload("qwen3-30b-a3b", "v5p:4x8x8", (1, 16, 16, 1), rows=256, micro_batch_rows=256),
    "30b-v5p-1024": Workload("qwen3-30b-a3b", "v5p:8x8x16", (1, 16, 64, 1), rows=1024, micro_batch_rows=1024),
    "30b-v5p-slices": Workload("qwen3-30b-a3b", "v5p:4x4x4:2", (2, 4, 16, 1), rows=128, micro_batch_rows=128),
    "30b-v5p-8": Workload("qwen3-30b-a3b", "v5p:2x2x2", (1, 8, 1, 1), rows=64, micro_batch_rows=8),
    "30b-v5e": Workload("qwen3-30b-a3b", "v5e:16x16", (1, 256, 1, 1), rows=256, micro_batch_rows=256),
    "30b-h100": Workload("qwen3-30b-a3b", "h100:8", (1, 8, 1, 1), rows=8, micro_batch_rows=8),
    "30b-h100-expert": Workload("qwen3-30b-a3b", "h100:8", (1, 1, 8, 1), rows=32, micro_batch_rows=32),
    **{  # as many tokens a GPU on more nodes
        f"30b-h100-{n}": Workload("qwen3-30b-a3b", f"h100:{n}", (1, n // 8, 8, 1), rows=4 * n, micro_batch_rows=4 * n)
        for n in (64, 256, 1024)
    },
    "0.6b-v5e": Workload("qwen3-0.6b", "v5e:2x2", (1, 4, 1, 1), rows=32, micro_batch_rows=4, remat="dots"),
    **{  # as many tokens a chip on more of them, 128 on two slices and 1024 on four
        f"0.6b-v5e-{n}": Workload(
            "qwen3-0.6b", f"v5e:{shape}", (n // 4, 4, 1, 1), rows=8 * n, micro_batch_rows=n, remat="dots"
        )
        for n, shape in ((64, "8x8"), (128, "8x8:2"), (256, "16x16"), (1024, "16x16:4"))
    },
    "0.6b-v5p": Workload("qwen3-0.6b", "v5p:2x2x1", (1, 4, 1, 1), rows=32, micro_batch_rows=32, remat="dots"),
    "0.6b-h100": Workload("qwen3-0.6b", "h100:1", (1, 1, 1, 1), rows=32, micro_batch_rows=8, remat="dots"),
    "0.6b-h100-8": Workload("qwen3-0.6b", "h100:8", (1, 8, 1, 1), rows=256, micro_batch_rows=64, remat="dots"),
    "0.6b-h100-32": Workload("qwen3-0.6b", "h100:32", (4, 8, 1, 1), rows=1024, micro_batch_rows=256, remat="dots"),
    "1b-dense-h100": Workload("1b-dense", "h100:1", (1, 1, 1, 1), **_MEASURED),
    "1b-moe-h100": Workload("1b-moe", "h100:1", (1, 1, 1, 1), **_MEASURED),
    "8b-h100-32k": Workload("qwen3-8b", "h100:8", (1, 8, 1, 1), rows=8, micro_batch_rows=8, answer=32768),
    "8b-v5p-32k": Workload("qwen3-8b", "v5p:2x2x2", (1, 8, 1, 1), rows=8, micro_batch_rows=8, answer=32768),
    "8b-v5p-32k-context": Workload("qwen3-8b", "v5p:2x2x2", (1, 2, 1, 1, 4), rows=8, micro_batch_rows=2, answer=32768),
    "0.6b-h100-32k": Workload("qwen3-0.6b", "h100:8", (1, 8, 1, 1), rows=8, micro_batch_rows=8, answer=32768),
}


def settings_of(workload: Workload, layers: int | None = None, rollout_mesh: tuple[int, ...] = ()) -> Settings:
    """A validated run of the smoke config, at the workload's size.

    layers: fewer than the model has. rollout_mesh: where it samples, if not on the workload's mesh.
    """
    config: Any = gspo.get_config("smoke")
    moe = MODELS[workload.model].num_experts > 0
    with config.unlocked():
        config.rollout.prompts, config.rollout.group_size = workload.rows // 8, 8
        config.rollout.max_new_tokens = workload.answer
        config.rollout.dtype = "bfloat16"
        config.rollout.mesh_shape = rollout_mesh
        config.warm_start.batch_size = max(config.warm_start.batch_size, workload.rows)  # rows for every device
        config.updates.minibatches = 1
        config.updates.epochs = 2
        config.updates.micro_batch_rows = workload.micro_batch_rows
        config.updates.layout = "padded"  # every answer has its bound
        config.replay.mode = "R2" if moe else "off"
        config.mesh.shape = workload.mesh
        if not moe:
            config.model.num_experts = 0
    s = validate(config)
    model = dataclasses.replace(MODELS[workload.model], remat=workload.remat)
    if layers is not None:
        model = dataclasses.replace(model, num_hidden_layers=layers)
    return dataclasses.replace(s, model=model, task=dataclasses.replace(s.task, prompt_length=workload.prompt))
