"""ConfigDict -> frozen dataclasses. No lower floor sees a ConfigDict, and a `Settings` is always valid.

`validate` names the field, the value and the remedy. Ranges are checked by the dataclass that has the field,
consistency of two blocks by agreement.py.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm import models, objectives, tasks
from jaxrl_llm.config import versions
from jaxrl_llm.config.field_names import unknown_field
from jaxrl_llm.ground.declared import declaration, declarations
from jaxrl_llm.models import ModelConfig
from jaxrl_llm.records.recorded import checkpoint_identity
from jaxrl_llm.run.agreement import check_agreement
from jaxrl_llm.run.blocks import RolloutConfig, Settings, TaskConfig
from jaxrl_llm.run.fields import BLOCKS, declared_fields
from jaxrl_llm.tasks.preference import file_identity

# Fields of rollouts that say where the servers are, not what they do.
_PLACES = {"servers", "launch", "weights_dir", "deadline_s"}


class TaskSettings(NamedTuple):
    """A task without a training run: its data folder, most tokens of an answer, answers decoded at once (0: all)."""

    task: tasks.Task
    data_dir: str | None
    answer_length: int
    slots: int


def validate(config: ConfigDict) -> Settings:
    """The settings of a config.

    Raises:
      ValueError: a key is unknown or missing, a value is of the wrong type or out of range, or two blocks disagree.
    """
    raw = config.to_dict()
    _same_keys("", raw, {"seed", "steps", "objective", *BLOCKS})
    for name in ("seed", "steps"):
        declaration(Settings, name).checked(name, raw[name])
    blocks = {name: _block(name, raw) for name in BLOCKS if name != "model"}
    task_config = blocks.pop("task")
    task, model = _task_and_model(raw, task_config, blocks["rollout"])
    settings = Settings(
        seed=raw["seed"],
        steps=raw["steps"],
        task=task,
        data_dir=task_config.data_dir or None,
        model=model,
        pretrained=raw["model"]["pretrained"],
        objective=_objective(raw["objective"], blocks["rollout"].max_new_tokens or task.answer_length),
        objective_name=raw["objective"]["name"],
        **blocks,
    )
    check_agreement(settings)
    return settings


def resolved_objective(config: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The name and every hyper-parameter that the objective of a validated config has, the recipe's defaults included.

    For config.json, whose reader need not know a recipe that the user's own file registers.
    """
    raw: Mapping[str, Any] = config["objective"]
    known = objectives.hyperparameters(raw["name"], raw.get("aggregation")) | _chosen(raw, settings.answer_length)
    return {"name": raw["name"]} | {key: value for key, value in known.items() if value is not None}


def task_settings(config: ConfigDict, tokenizer: tasks.Tokenizer) -> TaskSettings:
    """The task of a config for a policy with this tokenizer, whatever model the config trains; raises as `validate`."""
    raw = config.to_dict()
    task_config, rollout = _block("task", raw), _block("rollout", raw)
    task = _task(task_config, tokenizer, rollout)
    return TaskSettings(task, task_config.data_dir or None, rollout.max_new_tokens or task.answer_length, rollout.slots)


def model_settings(config: ConfigDict) -> tuple[ModelConfig, tasks.Tokenizer]:
    """The model of a config and the tokenizer of its prompts, whatever is trained; raises as `validate`."""
    raw = config.to_dict()
    task, model = _task_and_model(raw, _block("task", raw), _block("rollout", raw))
    return model, task.tokenizer


def identity_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies a run: its config without what may change on resume.

    The number of steps stays in when a learning-rate schedule depends on it, evaluation when it decides where a warm
    start stops. Fields of the objective that are None stay out: which there are depends on the recipes registered.
    """
    free = {"checkpoint", "log", "processes"}
    free |= {"steps"} if config["optimizer"]["schedule"] == "constant" else set()
    free |= set() if config["warm_start"]["target_pass_rate"] else {"evaluation"}
    kept = {key: value for key, value in versions.as_hashed(config).items() if key not in free}
    kept["objective"] = {key: value for key, value in config["objective"].items() if value is not None}
    kept["rollout"] = {key: value for key, value in kept["rollout"].items() if key not in _PLACES}
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


def _same_keys(block: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for a missing or unknown field of a block, or block of the config ("")."""
    for name in sorted(set(given) - set(known)):
        raise ValueError(unknown_field(f"{block}.{name}" if block else name, declared_fields()))
    if absent := sorted(set(known) - set(given)):
        raise ValueError(f"{block or 'config'} lacks {', '.join(absent)}; start from configs/base.py")


def _block(name: str, raw: Mapping[str, Any]) -> Any:
    _same_keys(name, raw[name], declarations(BLOCKS[name]))
    return BLOCKS[name].of(raw[name])


def _task_and_model(
    raw: Mapping[str, Any], task_config: TaskConfig, rollout: RolloutConfig
) -> tuple[tasks.Task, ModelConfig]:
    _same_keys("model", raw["model"], {*declarations(ModelConfig), "pretrained"})
    place = task_config.tokenizer or raw["model"]["pretrained"]
    task = _task(task_config, tasks.load_tokenizer(place) if place else None, rollout)
    return task, ModelConfig.of(models.complete_fields(raw["model"], task.tokenizer.vocab_size))


def _task(config: TaskConfig, tokenizer: tasks.Tokenizer | None, rollout: RolloutConfig) -> tasks.Task:
    """The task with the tokenizer of the model, and with the run's bound on prompts if it sets one.

    A data set drops longer prompts. For a task that draws its prompts the bound can only be lowered, and drawing a
    longer prompt raises.
    """
    prompting = tasks.Prompting(config.template, config.chat, config.system, config.chat_options)
    task = tasks.make(config.name, tokenizer=tokenizer, prompting=prompting, **config.options)
    if rollout.max_prompt_length > task.prompt_length and task.source is None and not task.drop_long:
        raise ValueError(
            f"rollout.max_prompt_length={rollout.max_prompt_length} exceeds the task's {task.prompt_length}; "
            "set it to 0"
        )
    length = rollout.max_prompt_length or task.prompt_length
    return dataclasses.replace(task, prompt_length=length, verify_truncated=config.verify_truncated)


def _objective(raw: Mapping[str, Any], answer_length: int) -> objectives.AnyObjective:
    """The recipe with the hyper-parameters that are set; one that the recipe does not have raises."""
    try:
        return objectives.make(raw["name"], **_chosen(raw, answer_length))
    except ValueError as error:
        raise ValueError(f"config.objective: {error}") from error


def _chosen(raw: Mapping[str, Any], answer_length: int) -> dict[str, Any]:
    chosen = {key: value for key, value in raw.items() if value is not None and key != "name"}
    if "max_length" in objectives.hyperparameters(raw["name"], chosen.get("aggregation")):
        chosen.setdefault("max_length", answer_length)
    return chosen
