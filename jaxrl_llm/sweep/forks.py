"""The configs of a trajectory and of the arms that fork from its states: read from a command line, checked, hashed."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.config import loading
from jaxrl_llm.config.command_line import fields_and_rest
from jaxrl_llm.run.settings import Settings, config_hash, validate
from jaxrl_llm.sweep.planned import Branching

__all__ = ["Plan", "Setup", "identify", "plan"]

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
        parts = [self.parent.config_hash, hashes, dataclasses.asdict(self.branching)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def plan(config_file: str, fields: Sequence[tuple[str, str]], branches: str) -> Plan:
    """The plan of a command line.

    Args:
      config_file, fields: the config of the trajectory.
      branches: JSON with the numbers of a `Branching` and `arms`: the fields of each arm by its name.

    Raises:
      ValueError: the JSON is not of that form, `validate` refuses a config, or an arm changes what all arms share.
    """
    try:
        given = json.loads(branches)
        fields_of_arms = given.pop("arms")
        branching = Branching(**given)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"branches={branches} must be JSON with first, every, rollouts and arms ({error})") from error
    source = loading.find(config_file)

    def setup(fields: Sequence[tuple[str, str]]) -> Setup:
        config = loading.load(source, fields)
        return Setup(config.to_dict(), config_hash(config), validate(config))

    parent = setup(fields)
    arms = {arm: setup(list(changed.items())) for arm, changed in fields_of_arms.items()}
    _check_rollouts("the trajectory", parent.settings)
    for arm, own in arms.items():
        _check_rollouts(f"arm {arm!r}", own.settings)
        theirs, ours = loading.flat(parent.config), loading.flat(own.config)
        for field in sorted(theirs | ours):
            shared = field.split(".")[0] in _SHARED or field in _SHARED_FIELDS
            if shared and theirs.get(field) != ours.get(field):
                raise ValueError(
                    f"arm {arm!r} sets {field}={ours.get(field)} where the trajectory has {theirs.get(field)}; arms of "
                    "one state differ in how they sample and learn, so make it a condition of the sweep"
                )
    return Plan(branching, parent, arms)


def _check_rollouts(whose: str, s: Settings) -> None:
    objective: Any = s.objective
    if objective.reads != "rollouts":
        raise ValueError(
            f"{whose}: {s.objective_name} learns from given data, and branches are of rollouts; use a sweep"
        )


def identify(config_file: str, overrides: Sequence[str]) -> tuple[str, int]:
    """(hash, rollouts of the trajectory) of a planned trajectory, from the arguments behind its config.

    Raises:
      ValueError: see `plan`.
    """
    fields, (branches,) = fields_and_rest(overrides)
    planned = plan(config_file, fields, branches.removeprefix("--branches="))
    return planned.identity, planned.parent.settings.steps
