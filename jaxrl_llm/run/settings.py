"""ConfigDict -> frozen dataclasses. No lower floor sees a ConfigDict, and a `Settings` is always valid.

`validate` names the field, the value and the remedy. Ranges are checked by the dataclass that has the field,
consistency of two blocks by agreement.py.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

from ml_collections import ConfigDict

from jaxrl_llm import models, objectives, tasks
from jaxrl_llm.config.field_names import EXAMPLES, unknown_field
from jaxrl_llm.models import ModelConfig
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.objectives import AnyObjective
from jaxrl_llm.records.recorded import checkpoint_identity
from jaxrl_llm.run import blocks as b
from jaxrl_llm.run.agreement import check_agreement
from jaxrl_llm.run.blocks import Settings
from jaxrl_llm.tasks.preference import PreferenceConfig, file_identity
from jaxrl_llm.training.collect import DynamicSampling
from jaxrl_llm.training.layout import UpdateConfig
from jaxrl_llm.training.optimizer import OptimizerConfig
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.reward_sources import RewardConfig
from jaxrl_llm.training.warm_start import WarmStartConfig

T = TypeVar("T")


_BLOCKS: dict[str, Any] = {
    "task": b.TaskConfig,
    "lora": LoRAConfig,
    "rollout": b.RolloutConfig,
    "warm_start": WarmStartConfig,
    "dynamic_sampling": DynamicSampling,
    "rewards": RewardConfig,
    "preference": PreferenceConfig,
    "replay": ReplayConfig,
    "updates": UpdateConfig,
    "optimizer": OptimizerConfig,
    "critic": b.CriticConfig,
    "evaluation": b.EvaluationConfig,
    "checkpoint": b.CheckpointConfig,
    "log": b.LogConfig,
    "mesh": b.MeshConfig,
    "processes": b.ProcessesConfig,
}


class TaskSettings(NamedTuple):
    """A task without a training run: its data folder, most tokens of an answer, answers decoded at once (0: all)."""

    task: tasks.Task
    data_dir: str | None
    answer_length: int
    slots: int


def validate(config: ConfigDict) -> Settings:
    """The settings of a config.

    Raises:
      ValueError: a key is unknown or missing, a value is of the wrong type or out of range, or two blocks disagree; the
        message names the field, the value and what to do.
    """
    raw = config.to_dict()
    _same_keys("", set(raw), {*_BLOCKS, "seed", "steps", "model", "objective"})
    for name, most in (("seed", 2**32 - 1), ("steps", 2**31 - 1)):
        if type(raw[name]) is not int or not 0 <= raw[name] <= most:
            raise ValueError(f"{name}={raw[name]!r} must be a whole number in 0..{most}")
    blocks = {name: _block(name, cls, raw[name]) for name, cls in _BLOCKS.items()}
    task_config = blocks.pop("task")
    task, model = _task_and_model(raw, task_config, blocks["rollout"])
    name, objective = _objective(raw["objective"], blocks["rollout"].max_new_tokens or task.answer_length)
    settings = Settings(
        seed=raw["seed"],
        steps=raw["steps"],
        task=task,
        data_dir=task_config.data_dir or None,
        model=model,
        pretrained=raw["model"]["pretrained"],
        objective=objective,
        objective_name=name,
        **blocks,
    )
    check_agreement(settings)
    return settings


def task_settings(config: ConfigDict, tokenizer: tasks.Tokenizer) -> TaskSettings:
    """The task of a config for a policy with this tokenizer, whatever model the config trains.

    Raises:
      ValueError: as `validate`, of the blocks task and rollout.
    """
    raw = config.to_dict()
    task_config, rollout = (_block(name, _BLOCKS[name], raw[name]) for name in ("task", "rollout"))
    task = _task(task_config, tokenizer, rollout)
    return TaskSettings(task, task_config.data_dir or None, rollout.max_new_tokens or task.answer_length, rollout.slots)


def model_settings(config: ConfigDict) -> tuple[ModelConfig, tasks.Tokenizer]:
    """The model of a config and the tokenizer of its prompts, whatever is trained.

    Raises:
      ValueError: as `validate`, of the blocks task, rollout and model.
    """
    raw = config.to_dict()
    task_config, rollout = (_block(name, _BLOCKS[name], raw[name]) for name in ("task", "rollout"))
    task, model = _task_and_model(raw, task_config, rollout)
    return model, task.tokenizer


def identity_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies a run: its config without what may change on resume (length, logging, evaluation, checkpoints,
    timeouts).

    The number of steps stays in when a learning-rate schedule depends on it, evaluation when it decides where a warm
    start stops. Fields of the objective that are None stay out, because which fields exist depends on the recipes
    registered.
    """
    free = {"checkpoint", "log", "processes"}
    free |= {"steps"} if config["optimizer"]["schedule"] == "constant" else set()
    free |= set() if config["warm_start"]["target_pass_rate"] else {"evaluation"}
    kept = {key: value for key, value in config.items() if key not in free}
    kept["objective"] = {key: value for key, value in config["objective"].items() if value is not None}
    if not kept["rollout"].get("mesh_shape"):  # a field that came later: runs without it stay what they are
        kept["rollout"] = {key: value for key, value in kept["rollout"].items() if key != "mesh_shape"}
    if path := config["model"]["pretrained"]:  # the content of the checkpoint counts, not its path
        kept["model"] = config["model"] | {"pretrained": models.fingerprint(path)}
    if path := config["rewards"]["reward_model"]:  # likewise
        kept["rewards"] = config["rewards"] | {"reward_model": _reward_model_identity(path)}
    if path := config["preference"]["file"]:  # likewise
        kept["preference"] = config["preference"] | {"file": file_identity(path)}
    return kept


def config_hash(config: ConfigDict) -> str:
    """The hash of `identity_fields`; a DIR belongs to one hash."""
    kept = identity_fields(config.to_dict())
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _reward_model_identity(path: str) -> list[Any]:
    try:
        return list(checkpoint_identity(path))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"rewards.reward_model={path}: {error}; train one: python -m jaxrl_llm.main --config reward_model "
            f"--workdir {path}"
        ) from error


def _same_keys(block: str, given: set[str], known: set[str]) -> None:
    """Raises ValueError for a missing or unknown key of a block (or of the config, "")."""
    for key in sorted(given - known):
        fields = {f"{name}.{f.name}" for name, cls in _BLOCKS.items() for f in dataclasses.fields(cls)}
        own = {f"{block}.{name}" if block else name for name in known}
        raise ValueError(unknown_field(f"{block}.{key}" if block else key, fields | own))
    if known - given:
        raise ValueError(f"{block or 'config'} lacks {', '.join(sorted(known - given))}; start from configs/base.py")


def _block(name: str, cls: Callable[..., T], values: Any) -> T:
    fields = {f.name: f.type for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    _same_keys(name, set(values), set(fields))
    return cls(**{key: _typed(f"{name}.{key}", value, fields[key]) for key, value in values.items()})


def _typed(where: str, value: Any, kind: Any) -> Any:
    """The value as the field's type: an int is accepted for a float and a list for a tuple; nothing else is
    converted."""
    expected: type = get_origin(kind) or kind
    if expected is float and type(value) is int:
        value = float(value)
    if expected is tuple and isinstance(value, list):
        value = tuple(value)
    if expected in EXAMPLES and type(value) is not expected:
        raise ValueError(f"{where}={value!r} must be {EXAMPLES[expected]}")
    if expected is tuple and get_args(kind)[0] is float:
        return tuple(_typed(where, one, float) for one in value)
    if expected is tuple and not all(type(n) is int for n in value):
        raise ValueError(f"{where}={value!r} must be {EXAMPLES[tuple]}")
    if expected is float and not math.isfinite(value):
        raise ValueError(f"{where}={value} must be finite")
    return value


def _task_and_model(
    raw: Mapping[str, Any], task_config: b.TaskConfig, rollout: b.RolloutConfig
) -> tuple[tasks.Task, ModelConfig]:
    place = task_config.tokenizer or raw["model"].get("pretrained", "")
    task = _task(task_config, tasks.load_tokenizer(place) if place else None, rollout)
    _same_keys("model", set(raw["model"]), {f.name for f in dataclasses.fields(ModelConfig)} | {"pretrained"})
    fields = models.complete_fields(raw["model"], task.tokenizer.vocab_size)
    return task, _block("model", ModelConfig, fields)


def _task(config: b.TaskConfig, tokenizer: tasks.Tokenizer | None, rollout: b.RolloutConfig) -> tasks.Task:
    """The task with the tokenizer of the model, and with the run's bound on prompts if it sets one.

    A data set drops longer prompts. For a task that draws its prompts the bound can only be lowered, and drawing a
    longer prompt raises.
    """
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


def _objective(raw: Mapping[str, Any], answer_length: int) -> tuple[str, AnyObjective]:
    """The recipe with the hyper-parameters that are set; one that the recipe does not have raises."""
    chosen = {key: value for key, value in raw.items() if value is not None and key != "name"}
    try:
        if "max_length" in objectives.hyperparameters(raw["name"], chosen.get("aggregation")):
            chosen.setdefault("max_length", answer_length)
        return raw["name"], objectives.make(raw["name"], **chosen)
    except ValueError as error:
        raise ValueError(f"config.objective: {error}") from error
