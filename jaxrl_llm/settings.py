"""ConfigDict -> frozen dataclasses. Below this file there is no ConfigDict, and a `Settings` is always valid.

`validate` names the field, the value and the remedy. Ranges are checked by the dataclass that owns the field; what two
blocks must agree on is checked here.
"""

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_origin

from ml_collections import ConfigDict

from jaxrl_llm import objectives, tasks
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.objectives import Objective
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.sharding import AXES
from jaxrl_llm.training.collect import DynamicSampling, RewardShaping
from jaxrl_llm.training.layout import UpdateConfig
from jaxrl_llm.training.optimizer import OptimizerConfig
from jaxrl_llm.training.routing_replay import ReplayConfig
from jaxrl_llm.training.warm_start import WarmStartConfig

__all__ = ["Settings", "config_hash", "validate"]

T = TypeVar("T")


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
    dtype: str

    def __post_init__(self) -> None:
        _at_least("rollout", self, 1, "prompts", "group_size")
        _at_least("rollout", self, 0, "max_prompt_length", "max_new_tokens", "slots")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"rollout.dtype={self.dtype!r} is not one of float32, bfloat16")
        truncated = self.top_p < 1 or self.top_k > 0 or self.temperature == 0
        if truncated and not self.allow_truncated:
            raise ValueError(
                f"rollout.temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p} sample from a "
                "truncated distribution, whose ratios are biased; use temperature > 0, top_k=0, top_p=1 or set "
                "rollout.allow_truncated=True"
            )
        if self.temperature == 0:
            raise ValueError("rollout.temperature=0 gives G equal answers and no gradient; set a positive temperature")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    kind: str
    learning_rate: float

    def __post_init__(self) -> None:
        if self.kind not in ("none", "head", "separate"):
            raise ValueError(f"critic.kind={self.kind!r} is not one of none, head, separate")


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    every: int
    prompts: int
    samples: int

    def __post_init__(self) -> None:
        _at_least("evaluation", self, 1, "every", "prompts", "samples")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int
    keep: int

    def __post_init__(self) -> None:
        _at_least("checkpoint", self, 1, "every", "keep")


@dataclasses.dataclass(frozen=True)
class LogConfig:
    samples: int
    diagnostics_every: int
    wandb: str

    def __post_init__(self) -> None:
        _at_least("log", self, 0, "samples", "diagnostics_every")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Settings:
    """A whole run. `task` and `objective` are made; `model` has the task's vocabulary."""

    seed: int
    steps: int
    task: tasks.Task
    data_dir: str | None
    model: ModelConfig
    warm_start: WarmStartConfig
    rollout: RolloutConfig
    dynamic_sampling: DynamicSampling
    rewards: RewardShaping
    objective: Objective
    objective_name: str
    replay: ReplayConfig
    updates: UpdateConfig
    optimizer: OptimizerConfig
    critic: CriticConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    mesh: MeshConfig

    @property
    def answer_length(self) -> int:
        return self.rollout.max_new_tokens or self.task.answer_length

    @property
    def rows(self) -> int:
        return self.rollout.prompts * self.rollout.group_size


_BLOCKS: dict[str, Any] = {
    "task": TaskConfig,
    "rollout": RolloutConfig,
    "warm_start": WarmStartConfig,
    "dynamic_sampling": DynamicSampling,
    "rewards": RewardShaping,
    "replay": ReplayConfig,
    "updates": UpdateConfig,
    "optimizer": OptimizerConfig,
    "critic": CriticConfig,
    "evaluation": EvaluationConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
    "mesh": MeshConfig,
}


def validate(config: ConfigDict) -> Settings:
    """The settings of a config.

    Raises:
      ValueError: a key is unknown or missing, a value is of the wrong type or out of range, or two blocks disagree; the
        message names the field, the value and what to do.
    """
    raw = config.to_dict()
    _same_keys("config", set(raw), {*_BLOCKS, "seed", "steps", "model", "objective"})
    for name, most in (("seed", 2**32 - 1), ("steps", 2**31 - 1)):
        if isinstance(raw[name], bool) or not isinstance(raw[name], int) or not 0 <= raw[name] <= most:
            raise ValueError(f"{name}={raw[name]!r} must be a whole number in 0..{most}")
    blocks = {name: _block(name, cls, raw[name]) for name, cls in _BLOCKS.items()}
    task_config = blocks.pop("task")
    task = _task(task_config, raw["model"].get("pretrained", ""), blocks["rollout"])
    model = _block("model", ModelConfig, {**raw["model"], "vocab_size": task.tokenizer.vocab_size})
    name, objective = _objective(raw["objective"], blocks["rollout"].max_new_tokens or task.answer_length)
    settings = Settings(
        seed=raw["seed"],
        steps=raw["steps"],
        task=task,
        data_dir=task_config.data_dir or None,
        model=model,
        objective=objective,
        objective_name=name,
        **blocks,
    )
    for check in (_check_batch, _check_mesh, _check_critic, _check_routing, _check_lengths):
        check(settings)
    return settings


def config_hash(config: ConfigDict) -> str:
    """What identifies a run: its config without what may change on resume (length, logging, evaluation, checkpoints).

    The number of steps stays in when a learning-rate schedule depends on it, evaluation when a warm start stops by it.
    Fields of the objective that are left to the recipe stay out: which there are depends on the recipes registered.
    """
    raw = config.to_dict()
    free = {"checkpoint", "log"}
    free |= {"steps"} if raw["optimizer"]["schedule"] == "constant" else set()
    free |= set() if raw["warm_start"]["target_pass_rate"] else {"evaluation"}
    kept = {key: value for key, value in raw.items() if key not in free}
    kept["objective"] = {key: value for key, value in raw["objective"].items() if value is not None}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _at_least(block: str, config: Any, low: int, *names: str) -> None:
    for name in names:
        if getattr(config, name) < low:
            raise ValueError(f"{block}.{name}={getattr(config, name)} must be at least {low}")


def _same_keys(where: str, given: set[str], known: set[str]) -> None:
    for key in sorted(given - known):
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(sorted(known))}"
        raise ValueError(f"{where} has no field {key!r}{hint}")
    if known - given:
        raise ValueError(f"{where} lacks {', '.join(sorted(known - given))}; start from configs/base.py")


def _block(name: str, cls: Callable[..., T], values: Any) -> T:
    fields = {f.name: f.type for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    _same_keys(name, set(values), set(fields))
    return cls(**{key: _typed(f"{name}.{key}", value, fields[key]) for key, value in values.items()})


def _typed(where: str, value: Any, kind: Any) -> Any:
    """The value as the field's type: an int may stand for a float and a list for a tuple, nothing else is converted."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(value, list):
        value = tuple(value)
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple) or not all(type(n) is int for n in value):
            raise ValueError(f"{where}={value!r} must be a tuple of whole numbers, for example (1, 2)")
        return value
    expected = {bool: bool, int: int, float: float, str: str}.get(kind, object)
    if not isinstance(value, expected) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{where}={value!r} must be of type {kind.__name__}, not {type(value).__name__}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{where}={value} must be finite")
    return value


def _task(config: TaskConfig, pretrained: str, rollout: RolloutConfig) -> tasks.Task:
    """The task as it is put to this model, with the run's own bound on prompts, if there is one.

    A data set drops longer prompts; of a task that draws its prompts, the bound can only be lowered, and a longer
    prompt raises when it is drawn.
    """
    tokenizer = tasks.load_tokenizer(config.tokenizer or pretrained) if config.tokenizer or pretrained else None
    prompting = tasks.Prompting(config.template, config.chat, config.system, config.chat_options)
    task = tasks.make(config.name, tokenizer=tokenizer, prompting=prompting, **config.options)
    drops = task.source is not None or task.drop_long
    if rollout.max_prompt_length > task.prompt_length and not drops:
        raise ValueError(
            f"rollout.max_prompt_length={rollout.max_prompt_length} exceeds the task's {task.prompt_length}; "
            "set it to 0"
        )
    return dataclasses.replace(
        task,
        prompt_length=rollout.max_prompt_length or task.prompt_length,
        verify_truncated=config.verify_truncated,
    )


def _objective(raw: Mapping[str, Any], answer_length: int) -> tuple[str, Objective]:
    """The recipe with the hyper-parameters that are set; a set one that the recipe lacks raises."""
    chosen = {key: value for key, value in raw.items() if value is not None and key != "name"}
    try:
        if "max_length" in objectives.hyperparameters(raw["name"], chosen.get("aggregation")):
            chosen.setdefault("max_length", answer_length)
        return raw["name"], objectives.make(raw["name"], **chosen)
    except ValueError as error:
        raise ValueError(f"config.objective: {error}") from error


def _check_batch(s: Settings) -> None:
    rows, updates = s.rows, s.updates
    if rows % updates.minibatches:
        raise ValueError(
            f"updates.minibatches={updates.minibatches} must divide rollout.prompts x rollout.group_size = {rows}"
        )
    if updates.shuffle == "groups" and s.rollout.prompts % updates.minibatches:
        raise ValueError(
            f"updates.minibatches={updates.minibatches} must divide rollout.prompts={s.rollout.prompts} "
            "with updates.shuffle=groups"
        )
    per_minibatch = rows // updates.minibatches
    if updates.micro_batch_rows and per_minibatch % updates.micro_batch_rows:
        raise ValueError(
            f"updates.micro_batch_rows={updates.micro_batch_rows} must divide the {per_minibatch} rows of a minibatch"
        )
    if s.objective.whole_minibatch and updates.micro_batch_rows not in (0, per_minibatch):
        raise ValueError(
            f"updates.micro_batch_rows={updates.micro_batch_rows} cuts the minibatch that "
            f"{s.objective_name} reads as a whole; set it to 0"
        )
    if s.rollout.group_size < 2 and s.objective.advantage.compares_groups:
        raise ValueError(
            f"rollout.group_size={s.rollout.group_size} gives {s.objective_name} no group to compare with; "
            "set it to at least 2"
        )
    if s.rollout.slots and s.rollout.slots > rows:
        raise ValueError(f"rollout.slots={s.rollout.slots} is more than the {rows} answers of a step; set it to 0")


def _check_mesh(s: Settings) -> None:
    shape = s.mesh.shape
    if len(shape) != len(AXES):
        raise ValueError(f"mesh.shape={shape} must be four whole numbers, for {', '.join(AXES)}")
    lanes = shape[0] * shape[1]
    micro = s.updates.micro_batch_rows or s.rows // s.updates.minibatches
    if lanes > 1 and (micro % lanes or s.rows % lanes):
        raise ValueError(
            f"mesh.shape={shape} spreads rows over {lanes} devices, which must divide the {micro} rows of a "
            "micro-batch; change mesh.shape, updates.micro_batch_rows or updates.minibatches"
        )


def _check_critic(s: Settings) -> None:
    needed = s.objective.advantage.needs_values
    if needed and s.critic.kind == "none":
        raise ValueError(f"objective.name={s.objective_name!r} needs values; set critic.kind to head or separate")
    if not needed and s.critic.kind != "none":
        raise ValueError(f"critic.kind={s.critic.kind!r} serves no {s.objective_name}; set it to none")


def _check_routing(s: Settings) -> None:
    if not s.model.num_moe_layers:
        if s.replay.mode != "off":
            raise ValueError(
                f"replay.mode={s.replay.mode!r} needs an MoE model; set model.num_experts or replay.mode=off"
            )
        if "router_logprobs" in s.objective.needs:
            raise ValueError(f"objective.name={s.objective_name!r} weighs router shift and needs model.num_experts > 0")
        if s.updates.aux_coef:
            raise ValueError(f"updates.aux_coef={s.updates.aux_coef} balances experts and needs model.num_experts > 0")
    elif (
        s.model.num_experts_per_tok == 1
        and s.model.norm_topk_prob
        and s.optimizer.router_factor
        and not s.updates.aux_coef
    ):
        raise ValueError(
            "model.num_experts_per_tok=1 with norm_topk_prob makes every gate 1, so the router gets no gradient; "
            "set norm_topk_prob=False, or say that you know by optimizer.router_factor=0"
        )


def _check_lengths(s: Settings) -> None:
    cache = s.rewards.overlong_cache
    if cache > s.answer_length:
        raise ValueError(f"rewards.overlong_cache={cache} must be at most rollout.max_new_tokens={s.answer_length}")
