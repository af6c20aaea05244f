"""The blocks of a configuration as frozen dataclasses, and `Settings`, the whole run. Each checks its own ranges."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm import tasks
from jaxrl_llm.ground.ranges import at_least, at_least_zero, one_of
from jaxrl_llm.models import EXACT, ModelConfig, Router
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.objectives import AnyObjective
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.tasks.preference import PreferenceConfig
from jaxrl_llm.training.collect import DynamicSampling
from jaxrl_llm.training.layout import UpdateConfig
from jaxrl_llm.training.optimizer import OptimizerConfig
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.reward_sources import RewardConfig
from jaxrl_llm.training.warm_start import WarmStartConfig


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    name: str
    options: Mapping[str, Any]
    data_dir: str
    tokenizer: str
    template: str
    chat: bool
    system: str
    chat_options: Mapping[str, Any]
    verify_truncated: bool


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    prompts: int
    group_size: int
    max_prompt_length: int
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    allow_truncated: bool
    slots: int
    prompt_buckets: int
    dtype: str
    router_dtype: str
    router_noise: float
    mesh_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("prompts", "group_size", "prompt_buckets"):
            at_least(f"rollout.{name}", getattr(self, name), 1)
        for name in ("max_prompt_length", "max_new_tokens", "slots"):
            at_least(f"rollout.{name}", getattr(self, name), 0)
        one_of("rollout.dtype", self.dtype, ("float32", "bfloat16", "float8_e4m3"))
        if self.temperature == 0:
            raise ValueError(
                "rollout.temperature=0 makes all answers of a group equal, so there is nothing to compare; "
                "set rollout.temperature=1.0"
            )
        assert self.sampling  # checks the ranges of temperature, top_k and top_p
        assert self.router  # and those of its dtype and noise
        truncated = self.top_p < 1 or self.top_k > 0
        if truncated and not self.allow_truncated:
            raise ValueError(
                f"rollout.top_k={self.top_k}, rollout.top_p={self.top_p} sample from a truncated distribution, whose "
                "ratios are biased; set top_k=0 and top_p=1.0, or rollout.allow_truncated=True"
            )

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def router(self) -> Router:
        return Router(self.router_dtype, self.router_noise)


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    kind: str
    learning_rate: float
    warmup_steps: int

    def __post_init__(self) -> None:
        one_of("critic.kind", self.kind, ("none", "head", "separate"))
        at_least_zero("critic.learning_rate", self.learning_rate)
        at_least("critic.warmup_steps", self.warmup_steps, 0, "0 turns it off")
        if self.warmup_steps and self.kind == "none":
            raise ValueError(
                f"critic.warmup_steps={self.warmup_steps} but there is no critic; set it to 0, or critic.kind to head "
                "or separate"
            )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    every: int
    prompts: int
    samples: int

    def __post_init__(self) -> None:
        for name in ("every", "prompts", "samples"):
            at_least(f"evaluation.{name}", getattr(self, name), 1)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int
    keep: int

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            at_least(f"checkpoint.{name}", getattr(self, name), 1)


@dataclasses.dataclass(frozen=True)
class LogConfig:
    samples: int
    diagnostics_every: int
    wandb: str

    def __post_init__(self) -> None:
        for name in ("samples", "diagnostics_every"):
            at_least(f"log.{name}", getattr(self, name), 0)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ProcessesConfig:
    start_timeout_s: int
    heartbeat_timeout_s: int

    def __post_init__(self) -> None:
        for name in ("start_timeout_s", "heartbeat_timeout_s"):
            at_least(f"processes.{name}", getattr(self, name), 1)


@dataclasses.dataclass(frozen=True)
class Settings:
    """A whole run. `task` and `objective` are objects, `model` has every field set, `pretrained` is its checkpoint's
    path or ""."""

    seed: int
    steps: int
    task: tasks.Task
    data_dir: str | None
    model: ModelConfig
    pretrained: str
    lora: LoRAConfig
    warm_start: WarmStartConfig
    rollout: RolloutConfig
    dynamic_sampling: DynamicSampling
    rewards: RewardConfig
    preference: PreferenceConfig
    objective: AnyObjective
    objective_name: str
    replay: ReplayConfig
    updates: UpdateConfig
    optimizer: OptimizerConfig
    critic: CriticConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    mesh: MeshConfig
    processes: ProcessesConfig

    @property
    def answer_length(self) -> int:
        return self.rollout.max_new_tokens or self.task.answer_length

    @property
    def rows(self) -> int:
        return self.rollout.prompts * self.rollout.group_size

    @property
    def sampler_precision(self) -> str:
        """How closely the trainer may expect to agree with the sampler: that of a dtype, "made different" of none.

        Adapters are merged in the dtype of the weights: in bfloat16 that is what is sampled from.
        """
        if self.rollout.router != EXACT:
            return "made different"
        merged = self.model.param_dtype if self.lora.rank else "float32"
        return self.rollout.dtype if merged == "float32" else merged
