"""Read the DIRs of runs: one run, a folder of runs, or a sweep with its sweep.json."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.records.run_log import read_json, read_rows

CLIPPED = "clip/low + clip/high"  # the share of tokens clipped on either side: the one metric that is derived here


def collapse_index(reward: Sequence[float] | np.ndarray, *, share: float = 0.5, patience: int = 5) -> int | None:
    """Index of the rollout at which a run has collapsed, from the mean reward of every rollout; None if it never does.

    A run has collapsed at the first rollout whose mean reward is not finite, or that ends `patience` rollouts in a row
    below `share` of the highest mean of `patience` rewards in a row so far (at the start: of as many as there are). A
    mean sets the bar because in a long run of few prompts a single high reward is chance.
    """
    reward, below, best = np.asarray(reward, np.float64), 0, -np.inf
    for i, value in enumerate(reward):
        if not np.isfinite(value):
            return i
        best = max(best, np.mean(reward[max(i + 1 - patience, 0) : i + 1]))
        below = below + 1 if value < share * best else 0
        if below == patience:
            return i
    return None


@dataclass(frozen=True)
class Run:
    """One DIR: what was planned (arm, condition, seed, branch) and what it logged so far."""

    workdir: Path
    arm: str
    condition: str = ""
    seed: str = ""
    branch: str = ""  # runs of one seed and several branches start from states of one trajectory: not independent

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.workdir / "metrics.jsonl")

    @cached_property
    def record(self) -> Mapping[str, Any]:
        return read_json(self.workdir / "config.json") or {}

    @cached_property
    def finished(self) -> bool:
        return (self.workdir / "result.json").exists()

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        return read_rows(self.workdir / "samples.jsonl")

    @cached_property
    def failure(self) -> dict[str, Any] | None:
        return read_json(self.workdir / "failed.json")

    @property
    def diverged(self) -> bool:
        """Whether a loss or gradient that is not finite stopped the run; a sweep keeps the error message."""
        return not self.finished and "not finite" in (self.failure or {}).get("last_line", "")

    @property
    def ended(self) -> bool:
        return self.finished or self.diverged

    @property
    def status(self) -> str:
        """Finished, diverged, crashed (a sweep leaves failed.json), stopped or not started, in words."""
        if self.finished:
            return "finished"
        where = f"after step {self.rows[-1]['step']}" if self.rows else "before the first step"
        if self.diverged:
            return f"diverged {where}: a number was not finite; it counts with reward 0"
        if self.failure is not None:
            return f"crashed {where} with exit code {self.failure['exit_code']}: {self.failure['last_line']}"
        return f"stopped {where}" if self.rows else "not started"

    @property
    def batch(self) -> str:
        """The short hash of the commit that it ran at; runs of one study at two commits replicate each other."""
        return str(self.record.get("commit") or "unknown")[:7]

    @property
    def label(self) -> str:
        parts = (self.arm, self.condition, self.seed and f"seed {self.seed}", self.branch and f"branch {self.branch}")
        return ", ".join(part for part in parts if part)

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the rows that hold the key; null is NaN, lists give an array with more axes.

        Lists of another shape than the first are left out.
        """
        if key == CLIPPED:
            sides = [k for k in ("clip/low", "clip/high") if any(k in row for row in self.rows)]
            pairs = [(row["step"], [row.get(k) for k in sides]) for row in self.rows if any(k in row for k in sides)]
            values = np.array([value for _, value in pairs], np.float64).reshape(-1, len(sides) or 1)
            return np.array([step for step, _ in pairs], np.float64), values.sum(1)
        pairs = [(row["step"], row[key]) for row in self.rows if key in row]
        shape = np.shape(pairs[0][1]) if pairs else ()
        pairs = [(step, value) for step, value in pairs if np.shape(value) == shape]
        return np.array([step for step, _ in pairs], np.float64), np.array([value for _, value in pairs], np.float64)

    def value(self, key: str, *, at: int = -1) -> float:
        """One of the finite values under the key: the last by default, the first with at=0; NaN if there is none."""
        values = self.series(key)[1]
        values = values[np.isfinite(values)]
        return float(values[at]) if len(values) else float("nan")

    def average(self, key: str, last: int = 0) -> float:
        """Mean of the finite values in all rows that hold the key, or in the `last` of them; NaN if there is none."""
        values = self.series(key)[1][-last:]
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else float("nan")

    def collapse(self) -> tuple[float, bool]:
        """(step of collapse, True), or (last step, False); (NaN, False) for a run without a rollout."""
        steps, reward = self.series("reward/mean")
        index = collapse_index(reward)
        if index is not None:
            return float(steps[index]), True
        last = float(steps[-1]) if len(steps) else float("nan")
        return (np.nan_to_num(last) + 1, True) if self.diverged else (last, False)


@dataclass(frozen=True)
class Branch(Run):
    """A branch from one state of a trajectory: a run of a few rollouts, whose rows are in branches.jsonl.

    `workdir` is the trajectory's; `branch` is the number of rollouts before the state.
    """

    written: Sequence[Mapping[str, Any]] = ()
    recorded: Mapping[str, Any] = field(default_factory=dict)  # config.json of the trajectory

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.written if "failed" not in row]

    @cached_property
    def record(self) -> Mapping[str, Any]:
        return {**self.recorded, "config": self.recorded.get("arms", {}).get(self.arm, {})}

    @cached_property
    def failure(self) -> dict[str, Any] | None:
        failed = [row["failed"] for row in self.written if "failed" in row]
        return {"last_line": failed[0], "exit_code": 1} if failed else None

    @cached_property
    def finished(self) -> bool:
        return self.failure is None  # the rows of a state are written at once, with the last evaluation


@dataclass(frozen=True)
class Study:
    """Runs that are read together, and the arm that the others are compared with."""

    question: str
    runs: Sequence[Run]
    baseline: str
    branching: Mapping[str, Any] = field(default_factory=dict)  # of a sweep of branches; empty for runs from the start
    unfinished: Sequence[str] = ()  # the trajectories of such a sweep that have not ended, each with its status

    @property
    def arms(self) -> list[str]:
        return sorted(dict.fromkeys(run.arm for run in self.runs), key=lambda arm: arm != self.baseline)

    @property
    def conditions(self) -> list[str]:
        return list(dict.fromkeys(run.condition for run in self.runs))

    def select(self, arm: str, condition: str) -> list[Run]:
        return [run for run in self.runs if (run.arm, run.condition) == (arm, condition)]

    def values(self, key: str, condition: str) -> np.ndarray:
        """Every finite number that a run of the condition logged under the key, in one axis."""
        runs = [run for run in self.runs if run.condition == condition]
        values = np.concatenate([run.series(key)[1].ravel() for run in runs] or [np.zeros(0)])
        return values[np.isfinite(values)]

    def has(self, key: str, condition: str) -> bool:
        return self.values(key, condition).size > 0


def load(folder: str | os.PathLike[str]) -> Study:
    """The study in a folder: a sweep if it has sweep.json, a run if it has metrics.jsonl.

    Otherwise every folder below it that holds metrics.jsonl is a run. Its path names the arm, except for a last part
    that is a number, which is the seed.

    Raises:
        FileNotFoundError: there is no run in the folder.
    """
    folder = Path(folder)
    plan = read_json(folder / "sweep.json")
    if plan is not None and "branching" in plan:
        return _load_branches(folder, plan)
    if plan is not None:
        runs = [
            Run(folder / r["folder"], r["arm"], r["condition"], str(r["seed"]), str(r.get("branch", "")))
            for r in plan["runs"]
        ]
        return Study(plan["question"], runs, plan["baseline"])
    if (folder / "metrics.jsonl").exists():
        name = folder.resolve().name
        return Study("", [Run(folder, name)], name)
    runs = []
    for path in sorted(folder.rglob("metrics.jsonl")):
        *rest, last = path.parent.relative_to(folder).parts
        seeded = bool(rest) and last.isdigit()
        runs.append(Run(path.parent, "/".join(rest if seeded else [*rest, last]), seed=last if seeded else ""))
    if not runs:
        raise FileNotFoundError(f"DIR={folder} holds no run: no sweep.json and no metrics.jsonl in it or below it")
    return Study("", runs, runs[0].arm)


def _load_branches(folder: Path, plan: Mapping[str, Any]) -> Study:
    runs: list[Run] = []
    unfinished = {}
    for planned in plan["runs"]:
        place, arm, labels = folder / planned["folder"], planned["arm"], (planned["condition"], str(planned["seed"]))
        rows, trajectory = read_rows(place / "branches.jsonl"), Run(place, "trajectory", *labels)
        starts = {row["state"]: row for row in rows if not row["arm"]}
        for state, start in starts.items():
            own = [row for row in rows if (row["arm"], row["state"]) == (arm, state)]
            if own:
                runs.append(Branch(place, arm, *labels, str(state), [start, *own], trajectory.record))
        if not trajectory.finished:
            unfinished[trajectory.label] = f"{trajectory.label}: {trajectory.status}, {len(starts)} states branched"
    return Study(plan["question"], runs, plan["baseline"], plan["branching"], list(unfinished.values()))
