"""A sweep is data: a question and a list of flat dicts, one a run, made with four combinators.

    arms = chain([{"arm": "GRPO", "objective.name": "grpo"}], [{"arm": "GSPO", "objective.name": "gspo"}])
    runs = product(arms, each("updates.minibatches", [4, 8]), each("seed", range(5)))        # seeds last

A run holds its labels (`arm`, `seed`, and where the sweep has several settings `condition`) and dotted fields of the
configuration. Two runs of one condition and seed are a pair: they must differ in what their arms say and nothing else.
"""

import itertools
import json
import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxrl_llm.ground.declared import Block, declared
from jaxrl_llm.ground.ranges import in_range

_LABELS = ("arm", "condition", "seed", "config")


def each(field: str, values: Iterable[Any]) -> list[dict[str, Any]]:
    """One dict a value: each("seed", range(3))."""
    return [{field: value} for value in values]


def chain(*parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All dicts of all parts, one part after the other."""
    return [dict(one) for one in itertools.chain(*parts)]


def product(*parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every combination of one dict from each part, the last part fastest; ValueError if two parts set one field."""
    return [_merged(combination) for combination in itertools.product(*parts)]


def zipped(*parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The first dicts of all parts merged, then the second dicts, and so on.

    Raises:
        ValueError: the parts have different lengths, or two parts set one field.
    """
    lists = [list(part) for part in parts]
    if len({len(one) for one in lists}) > 1:
        raise ValueError(f"zipped parts have lengths {[len(one) for one in lists]}; give parts of one length")
    return [_merged(row) for row in zip(*lists, strict=True)]


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        twice = sorted(merged.keys() & part.keys())
        if twice:
            raise ValueError(f"field {twice[0]!r} is set by two parts of a sweep; set it in one of them")
        merged |= part
    return merged


@dataclass(frozen=True)
class Branching(Block, prefix="branching."):
    """Fork states of one trajectory into arms, instead of running every arm from its start.

    The trajectory is the baseline's run. From its states after `first`, first + every, ... rollouts each arm takes
    `rollouts` rollouts with their updates and is evaluated; after those numbers of rollouts that `evaluate` names, too.
    """

    first: int = declared(1, least=0)
    every: int = declared(1, least=1)
    rollouts: int = declared(1, least=1)
    evaluate: tuple[int, ...] = declared(())

    def check(self) -> None:
        if any(not 1 <= at <= self.rollouts for at in self.evaluate):
            raise ValueError(
                f"branching.evaluate={self.evaluate} must be numbers of rollouts from 1 to rollouts={self.rollouts}"
            )

    def numbers(self) -> dict[str, Any]:
        """Return the numbers as JSON, without those not asked for: a DIR belongs to a hash of these."""
        numbers = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {name: value for name, value in numbers.items() if value != []}

    def states(self, steps: int) -> range:
        """The states from which branches of a trajectory of `steps` rollouts start; a branch may go beyond its end."""
        return range(self.first, steps, self.every)


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: its labels, its folder below the sweep's DIR, its configuration file and fields."""

    arm: str
    condition: str
    seed: int
    folder: str
    config: str
    fields: tuple[tuple[str, Any], ...]
    branches: str = ""  # of a trajectory that forks: JSON with the numbers of its `Branching` and every arm's fields

    @property
    def overrides(self) -> tuple[str, ...]:
        fields = tuple(f"--config.{field}={value}" for field, value in self.fields)
        return (*fields, f"--branches={self.branches}") if self.branches else fields

    @property
    def arms(self) -> list[str]:
        """The arms whose rows its folder holds."""
        return list(json.loads(self.branches)["arms"]) if self.branches else [self.arm]

    def __str__(self) -> str:
        return ", ".join(part for part in (self.arm, self.condition, f"seed {self.seed}") if part)


@dataclass(frozen=True)
class Sweep:
    """A question and the runs that answer it.

    Attributes:
        question: one sentence, the title of the report.
        runs: flat dicts with `arm`, `seed` and dotted fields, optionally `condition` and `config` (a configuration file
            of their own).
        baseline: the arm that every other arm is compared with.
        config: configuration file of the runs, with an optional :variant.
        minutes: rough minutes of one run, for the estimate that is printed before the start.
        keep_checkpoints: how many checkpoints stay in each run's DIR at most.
        branching: how the arms fork from states of the baseline's runs; None: every arm is a run of its own.
    """

    question: str
    runs: Sequence[Mapping[str, Any]]
    baseline: str
    config: str = "configs/base.py"
    minutes: float | int = 1.0
    keep_checkpoints: int = 1
    branching: Branching | None = None

    def __post_init__(self) -> None:
        in_range("minutes", self.minutes, least=0, below=math.inf)
        for run, label in itertools.product(self.runs, ("arm", "seed")):
            if label not in run:
                raise ValueError(f"run {dict(run)} has no {label!r}; every run of a sweep needs one")
        arms = list(dict.fromkeys(run["arm"] for run in self.runs))
        if self.baseline not in arms:
            raise ValueError(f"baseline={self.baseline!r} is none of the arms {arms}; name one of them")
        folders = [self._planned(run).folder for run in self.runs]
        twice = sorted({folder for folder in folders if folders.count(folder) > 1})
        if twice:
            raise ValueError(f"several runs share the labels of {twice[0]!r}; give them different arms or conditions")
        self.planned()

    def planned(self) -> list[PlannedRun]:
        """The runs in the order in which they start: seed by seed, so that an interrupted sweep holds whole pairs.

        With `branching` there is one run a condition and seed, the baseline's, which holds the other arms.
        """
        planned = [self._planned(run) for run in self.runs]
        order = {seed: place for place, seed in enumerate(dict.fromkeys(run.seed for run in planned))}
        if self.branching is not None:
            planned = self._trajectories(planned, self.branching)
        return sorted(planned, key=lambda run: order[run.seed])

    def _planned(self, run: Mapping[str, Any]) -> PlannedRun:
        arm, condition, seed = str(run["arm"]), str(run.get("condition", "")), run["seed"]
        fields = {field: value for field, value in run.items() if field not in _LABELS}
        fields |= {"seed": seed, "checkpoint.keep": self.keep_checkpoints}
        config = str(run.get("config", self.config))
        return PlannedRun(arm, condition, seed, _folder(condition, arm, seed), config, tuple(fields.items()))

    def _trajectories(self, planned: Sequence[PlannedRun], branching: Branching) -> list[PlannedRun]:
        forks = []
        for label in dict.fromkeys((run.condition, run.seed) for run in planned):
            arms = {run.arm: run for run in planned if (run.condition, run.seed) == label}
            if self.baseline not in arms:
                raise ValueError(f"condition {label[0]!r}, seed {label[1]} has no arm {self.baseline!r} to branch from")
            parent = arms[self.baseline]
            for run in arms.values():
                if run.config != parent.config:
                    raise ValueError(f"{run} has another config than {self.baseline}; set the arms apart by fields")
            fields = {arm: {name: str(value) for name, value in run.fields} for arm, run in arms.items()}
            numbers = json.dumps(branching.numbers() | {"arms": fields})
            forks.append(replace(parent, folder=_folder(*label), branches=numbers))
        return forks


def _folder(*labels: Any) -> str:
    if outside := [label for label in map(str, labels) if label in (".", "..")]:
        raise ValueError(f"the label {outside[0]!r} of a run is no name of a folder; give it another")
    return "/".join(re.sub(r"[^\w.+=-]+", "_", str(label)) for label in labels if str(label))


def command(run: PlannedRun, workdir: str, module: str = "jaxrl_llm.main") -> str:
    """The run as one shell line; the same line resumes it, and returns at once when it is finished.

    Paths are absolute, so that it runs from any folder. A config that is no file here is the name of one.
    """
    path, colon, variant = run.config.partition(":")
    config = f"{Path(path).absolute() if Path(path).is_file() else path}{colon}{variant}"
    folder = Path(workdir).absolute() / run.folder
    return shlex.join([sys.executable, "-m", module, f"--config={config}", f"--workdir={folder}", *run.overrides])
