"""ConfigDict -> frozen dataclasses. No lower floor sees a ConfigDict, and a `Settings` is always valid.

`validate` names the field, the value and the remedy. Ranges are checked by the dataclass that has the field,
consistency of two blocks by agreement.py.
"""

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm import models, objectives, tasks
from jaxrl_llm.config.field_names import unknown_field
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.declared import declaration, declarations
from jaxrl_llm.models import ModelConfig
from jaxrl_llm.records.recorded import checkpoint_identity
from jaxrl_llm.run.agreement import check_agreement
from jaxrl_llm.run.blocks import EvaluationConfig, RolloutConfig, Settings, TaskConfig
from jaxrl_llm.run.fields import BLOCKS, declared_fields
from jaxrl_llm.tasks import preference
from jaxrl_llm.training.reward_sources import RewardConfig

_TAUGHT = ByName({"teacher_identity": "jaxrl_llm.run.teacher_identity"})
# Fields of rollouts that say where the servers are, not what they do.
_PLACES = {"servers", "launch", "weights_dir", "weights_by", "deadline_s"}


class TaskSettings(NamedTuple):
    """A task without a training run: its data folder, most tokens of an answer, answers decoded at once (0: all), and
    how an evaluation samples."""

    task: tasks.Task
    data_dir: str | None
    answer_length: int
    slots: int
    evaluation: EvaluationConfig


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
    task, model = _task_and_model(raw, task_config, blocks["rollout"], blocks["rewards"])
    settings = Settings(
        seed=raw["seed"],
        steps=raw["steps"],
        task=task,
        data_dir=task_config.data_dir or None,
        tokenizer=task_config.tokenizer,
        model=model,
        pretrained=raw["model"]["pretrained"],
        objective=_objective(raw["objective"], (blocks["rollout"].max_new_tokens or task.answer_length) * task.turns),
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
    known = objectives.hyperparameters(raw["name"], raw.get("aggregation"), raw.get("advantage")) | _chosen(
        raw, settings.sampled_length
    )
    return {"name": raw["name"]} | {key: value for key, value in known.items() if value is not None}


def task_settings(config: ConfigDict, tokenizer: tasks.Tokenizer) -> TaskSettings:
    """The task of a config for a policy with this tokenizer, whatever model the config trains; raises as `validate`."""
    raw = config.to_dict()
    task_config, rollout = _block("task", raw), _block("rollout", raw)
    task = _task(task_config, tokenizer, rollout, _block("rewards", raw))
    shape = rollout.max_new_tokens or task.answer_length, rollout.slots
    return TaskSettings(task, task_config.data_dir or None, *shape, _block("evaluation", raw))


def model_settings(config: ConfigDict) -> tuple[ModelConfig, tasks.Tokenizer]:
    """The model of a config and the tokenizer of its prompts, whatever is trained; raises as `validate`."""
    raw = config.to_dict()
    task, model = _task_and_model(raw, _block("task", raw), _block("rollout", raw), _block("rewards", raw))
    return model, task.tokenizer


def identity_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that identify a run: its config without what may change on resume.

    The number of steps stays in when a learning-rate schedule depends on it, evaluation when it decides where a warm
    start stops. Fields of the objective that are None stay out: which there are depends on the recipes registered. The
    date of prompts stays out too: a DIR keeps that of its first start (`run_dir.keep_day`).
    """
    free = {"checkpoint", "log", "processes"}
    free |= {"steps"} if config["optimizer"]["schedule"] == "constant" else set()
    free |= set() if config["warm_start"]["target_pass_rate"] else {"evaluation"}
    kept = {key: value for key, value in config.items() if key not in free}
    kept["objective"] = {key: value for key, value in config["objective"].items() if value is not None}
    kept["rollout"] = {key: value for key, value in kept["rollout"].items() if key not in _PLACES}
    kept["task"] = {key: value for key, value in kept["task"].items() if key != "date"}
    if path := config["model"]["pretrained"]:  # the content of the checkpoint counts, not its path
        kept["model"] = config["model"] | {"pretrained": models.fingerprint(path)}
    if path := config["rewards"]["reward_model"]:  # likewise
        kept["rewards"] = config["rewards"] | {"reward_model": _reward_model_identity(path)}
    if path := config["teacher"]["path"]:  # likewise
        kept["teacher"] = config["teacher"] | {"path": _TAUGHT["teacher_identity"](path)}
    if path := config["preference"]["file"]:  # likewise
        kept["preference"] = config["preference"] | {"file": preference.file_identity(path)}
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
    raw: Mapping[str, Any], task_config: TaskConfig, rollout: RolloutConfig, rewards: RewardConfig
) -> tuple[tasks.Task, ModelConfig]:
    _same_keys("model", raw["model"], {*declarations(ModelConfig), "pretrained"})
    checkpoint = raw["model"]["pretrained"]
    if checkpoint and isinstance(checkpoint, str):
        models.published_config(checkpoint, "float32")  # a family that is not supported is named before anything else
    place, day = task_config.tokenizer or checkpoint, task_config.date or f"{datetime.date.today()}"
    task = _task(task_config, tasks.load_tokenizer(place, day) if place else None, rollout, rewards)
    frozen = bool(raw["lora"]["rank"])
    return task, ModelConfig.of(models.complete_fields(raw["model"], task.tokenizer.vocab_size, frozen=frozen))


def _task(
    config: TaskConfig, tokenizer: tasks.Tokenizer | None, rollout: RolloutConfig, rewards: RewardConfig
) -> tasks.Task:
    """The task with the tokenizer of the model, the reward functions, and the run's bound on prompts if it sets one.

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
    if task.environment is not None:
        task = dataclasses.replace(
            task,
            turns=rollout.max_turns or task.turns,
            observation_length=rollout.max_observation_length or task.observation_length,
            episode_length=rollout.max_episode_length,
            keep_turns=config.keep_turns,
        )
    return dataclasses.replace(
        task,
        prompt_length=length,
        verify_truncated=config.verify_truncated,
        think_end_token=config.think_end_token,
        functions=rewards.verifiers(),
    )


def _objective(raw: Mapping[str, Any], answer_length: int) -> objectives.AnyObjective:
    """The recipe with the hyper-parameters that are set; one that the recipe does not have raises."""
    try:
        return objectives.make(raw["name"], **_chosen(raw, answer_length))
    except ValueError as error:
        raise ValueError(f"config.objective: {error}") from error


def _chosen(raw: Mapping[str, Any], answer_length: int) -> dict[str, Any]:
    chosen = {key: value for key, value in raw.items() if value is not None and key != "name"}
    if "max_length" in _hyperparameters(raw):
        chosen.setdefault("max_length", answer_length)
    return chosen


def _hyperparameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    return objectives.hyperparameters(raw["name"], raw.get("aggregation"), raw.get("advantage"))
