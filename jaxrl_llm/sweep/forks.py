"""The configs of a trajectory and of the arms that fork from its states: read from a command line, checked, hashed."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.config import loading
from jaxrl_llm.run.settings import Settings, config_hash, validate
from jaxrl_llm.sweep.planned import Branching

# What all arms of a trajectory have in common: its states, its prompts and how it is measured.
_SHARED = ("seed", "steps", "task", "model", "lora", "warm_start", "critic", "evaluation", "checkpoint", "mesh")
_SHARED_FIELDS = ("rollout.prompts", "rollout.group_size")


@dataclasses.dataclass(frozen=True)
class Setup:
    """One config: as it is recorded, what identifies it, and as settings."""

    config: Mapping[str, Any]
    config_hash: str
    settings: Settings


@dataclasses.dataclass(frozen=True)
class Plan:
    """A trajectory, its arms, and how it branches."""

    branching: Branching
    parent: Setup
    arms: Mapping[str, Setup]

    @property
    def baseline(self) -> str:
        """The arm that the trajectory itself is; "" where none has its config."""
        return next((arm for arm, setup in self.arms.items() if setup.config == self.parent.config), "")

    @property
    def identity(self) -> str:
        """The hash that a DIR of these branches belongs to; a longer trajectory goes on in it."""
        hashes = {arm: setup.config_hash for arm, setup in self.arms.items()}
        parts = [self.parent.config_hash, hashes, self.branching.numbers()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def plan(config_file: str, fields: Sequence[tuple[str, str]], branches: str, day: str = "") -> Plan:
    """The plan of a command line: the trajectory's config with its fields, and what `--branches` says.

    Args:
      day: of the DIR's first start, if its prompts name it.

    Raises:
      ValueError: the JSON is not of that form, `validate` refuses a config, or an arm changes what all arms share.
    """
    try:
        given = json.loads(branches)
        fields_of_arms = given.pop("arms")
        branching = Branching.of(given)
        fields_of_arms = {arm: list(fields.items()) for arm, fields in fields_of_arms.items()}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"branches={branches} must be JSON with first, every, rollouts and arms ({error})") from error
    source = loading.find(config_file)

    def setup(fields: Sequence[tuple[str, str]]) -> Setup:
        config: Any = loading.load(source, fields)
        if day and config.task.date not in ("", day):
            raise ValueError(f"task.date={config.task.date!r}, and the trajectory names {day}; leave task.date empty")
        config.task.date = day or config.task.date
        settings = validate(config)
        config.task.date = settings.task.day or config.task.date
        return Setup(config.to_dict(), config_hash(config), settings)

    parent = setup(fields)
    arms = {arm: setup(fields) for arm, fields in fields_of_arms.items()}
    theirs = loading.flat(parent.config)
    for whose, own in {"the trajectory": parent, **{f"arm {arm!r}": own for arm, own in arms.items()}}.items():
        objective: Any = own.settings.objective
        if objective.reads != "rollouts":
            name = own.settings.objective_name
            raise ValueError(f"{whose}: {name} learns from given data, and branches are of rollouts; use a sweep")
        if lag := own.settings.rollout.lag:
            raise ValueError(
                f"{whose}: rollout.lag={lag} trains on rollouts of states before the one that branches share; set it "
                "to 0, or use a sweep of whole runs"
            )
        if own.settings.task.environment is not None:
            raise ValueError(
                f"{whose}: task.name={own.settings.task.name!r} has several turns, and branches share a rollout of "
                "one; use a sweep of whole runs"
            )
        if (engine := own.settings.rollout.engine) != "jax":
            raise ValueError(
                f"{whose}: rollout.engine={engine} holds the weights of one policy, and branches sample from several; "
                "set it to jax, or use a sweep of whole runs"
            )
        ours = loading.flat(own.config)
        for field in sorted(theirs | ours):
            shared = field.split(".")[0] in _SHARED or field in _SHARED_FIELDS
            if shared and theirs.get(field) != ours.get(field):
                raise ValueError(
                    f"{whose} sets {field}={ours.get(field)} where the trajectory has {theirs.get(field)}; arms of one "
                    "state differ in how they sample and learn, so make it a condition of the sweep"
                )
    return Plan(branching, parent, arms)
