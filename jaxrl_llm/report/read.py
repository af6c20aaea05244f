"""Read the DIRs of runs: one run, a folder of runs, or a sweep with its sweep.json."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.records.run_log import missing_steps, read_json, said_of_damage, scan_rows
from jaxrl_llm.records.watch import Collapse
from jaxrl_llm.report.names import in_words

CLIPPED = "clip/low + clip/high"  # the share of tokens clipped on either side: the one metric that is derived here


def collapse_index(reward: Sequence[float] | np.ndarray) -> int | None:
    """Index of the rollout at which a run has collapsed, from the mean reward of every rollout; None if it never does.

    Below half of the bar, five rollouts in a row: see `Collapse`.
    """
    collapse = Collapse(share=0.5, patience=5)
    return next((i for i, value in enumerate(reward) if collapse.after(float(value))), None)


@dataclass(frozen=True)
class Run:
    """One DIR: what was planned (arm, condition, seed, branch) and what it logged so far."""

    workdir: Path
    arm: str
    condition: str = ""
    seed: str = ""
    branch: str = ""  # runs of one seed and several branches start from states of one trajectory: not independent

    @cached_property
    def damage(self) -> list[str]:
        """Faults of its files, a line each; it is left out of everything else."""
        return []

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        rows = self._read("metrics.jsonl", lambda row: [key for key in row if not _is_metric(key, row[key])])
        if lost := missing_steps(rows, 0, max((row["step"] for row in rows), default=-1)):
            self.damage.append(f"{self.workdir / 'metrics.jsonl'} has no rows of steps {lost}")
        return rows

    @cached_property
    def record(self) -> Mapping[str, Any]:
        record = self._object("config.json")
        if not isinstance(record.get("config", {}), dict):
            self.damage.append(f"{self.workdir / 'config.json'} holds no config of a run")
            return {}
        return record

    @property
    def solved(self) -> float:
        """The least reward of a right answer."""
        return float(self.record.get("solved", 1.0))

    def _object(self, name: str) -> dict[str, Any]:
        try:
            return read_json(self.workdir / name) or {}
        except (ValueError, OSError) as error:
            self.damage.append(str(error))
            return {}

    def _read(self, name: str, wrong: Callable[[Mapping[str, Any]], list[str]]) -> list[dict[str, Any]]:
        """The rows of a file without damaged ones, and without the fields that `wrong` names."""
        try:
            lines, damaged = scan_rows(self.workdir / name)
        except OSError as error:
            self.damage.append(f"{self.workdir / name} cannot be read ({error})")
            return []
        rows = []
        for _, row in lines:
            if fields := wrong(row):
                reason = f"{fields[0]}={row[fields[0]]!r:.40} is of another kind than the report reads"
                self.damage.append(f"{self.workdir / name}, step {row['step']}: {reason}")
            rows.append({key: value for key, value in row.items() if key not in fields})
        if damaged:
            self.damage.append(f"{said_of_damage(self.workdir / name, damaged)}; left out")
        return rows

    @cached_property
    def finished(self) -> bool:
        return os.path.exists(self.workdir / "result.json")  # also below a folder that may not be read

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        rows = self._read("samples.jsonl", lambda row: ["reward"] if not _is_number(row.get("reward")) else [])
        return [row for row in rows if isinstance(row.get("prompt"), str)]

    @cached_property
    def failure(self) -> dict[str, Any] | None:
        failed, unknown = self._object("failed.json"), {"last_line": "", "exit_code": "unknown"}
        if failed and (lost := unknown.keys() - failed.keys()):
            self.damage.append(f"{self.workdir / 'failed.json'} lacks {' and '.join(sorted(lost))}")
        return unknown | failed if failed else None

    @property
    def diverged(self) -> bool:
        """True if a loss or gradient that is not finite stopped the run; a sweep keeps the error message."""
        return not self.finished and "not finite" in str((self.failure or {}).get("last_line"))

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
    def warnings(self) -> list[str]:
        """The names of the warnings that the rows hold, with the steps from the first row to the last of each."""
        steps: dict[str, list[int]] = {}
        for row in self.rows:
            for name in row.get("log/warnings", ()):
                steps.setdefault(name, []).append(row["step"])
        return [f"{name} (steps {held[0]} to {held[-1]})" for name, held in steps.items()]

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
            pairs = [
                (row["step"], [row[k] if _is_number(row.get(k, ())) else None for k in sides])
                for row in self.rows
                if any(k in row for k in sides)
            ]
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
    recorded: Mapping[str, Any] = field(default_factory=dict)  # config.json of the trajectory with the arm's config

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.written if "failed" not in row]

    @property
    def record(self) -> Mapping[str, Any]:
        return self.recorded

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
    damage: Sequence[str] = ()  # of the sweep's own file, and of the files of trajectories

    def damaged(self) -> list[str]:
        """Faults of the files, a line each; it is read for that."""
        for run in self.runs:
            _ = run.rows, run.samples, run.record, run.failure
        return [*self.damage, *dict.fromkeys(line for run in self.runs for line in run.damage)]

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

    def seeds(self, condition: str) -> str:
        """The number of seeds that have ended: "n = 5", or arm by arm where it is not the same."""
        planned = {arm: runs for arm in self.arms if (runs := self.select(arm, condition))}
        counts = {arm: len({run.seed for run in runs if run.ended}) for arm, runs in planned.items()}
        if len(set(counts.values())) == 1:
            return f"n = {min(counts.values())}"
        return ", ".join(f"{arm} {n}" for arm, n in counts.items())

    def named(self, key: str) -> str:
        """The metric in words, with the number of samples of "best of k" as the runs logged it."""
        counts = dict.fromkeys(run.value("eval/k") for run in self.runs) if key == "eval/pass_at_k" else ()
        return in_words(key, " or ".join(f"{count:.0f}" for count in counts if np.isfinite(count)) or "k")

    def has(self, key: str, condition: str) -> bool:
        return self.values(key, condition).size > 0


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000)


def _is_metric(name: str, value: Any) -> bool:
    if name == "log/warnings":
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if name == "reward/mean":  # a collapse is judged by it
        return _is_number(value)
    return value != [] and _is_numbers(value)


def _is_numbers(value: Any) -> bool:
    """Return whether it is a number, null, or a list of rows of one length of such."""
    if not isinstance(value, list):
        return _is_number(value)
    try:
        return all(map(_is_numbers, value)) and np.asarray(value, np.float64) is not None
    except ValueError:  # a ragged list
        return False


def load(folder: str | os.PathLike[str]) -> Study:
    """The study in a folder: a sweep if it has sweep.json, a run if it has metrics.jsonl.

    Otherwise, and where sweep.json is damaged, every folder below it that holds metrics.jsonl is a run. Its path names
    the arm, except for a last part that is a number, which is the seed.

    Raises:
        FileNotFoundError: there is no run in the folder.
    """
    folder = Path(folder)
    damage = []
    try:
        plan = read_json(folder / "sweep.json")
        if plan is not None:
            return _planned(folder, plan)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (
            error if isinstance(error, ValueError) else f"{folder / 'sweep.json'} is no plan of a sweep ({error!r})"
        )
        damage = [f"{reason}; runs are named by their folders"]
    if (folder / "metrics.jsonl").exists():
        name = folder.resolve().name
        return Study("", [Run(folder, name)], name, damage=damage)
    runs = []
    for path in sorted(folder.rglob("metrics.jsonl")):
        *rest, last = path.parent.relative_to(folder).parts
        seeded = bool(rest) and last.isdigit()
        runs.append(Run(path.parent, "/".join(rest if seeded else [*rest, last]), seed=last if seeded else ""))
    if not runs:
        raise FileNotFoundError(f"DIR={folder} holds no run: no sweep.json and no metrics.jsonl in it or below it")
    return Study("", runs, runs[0].arm, damage=damage)


def _planned(folder: Path, plan: Mapping[str, Any]) -> Study:
    texts = [
        plan["question"],
        plan["baseline"],
        *(r[key] for r in plan["runs"] for key in ("folder", "arm", "condition")),
    ]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise TypeError(f"{wrong[0]!r:.60} should be text")
    if "branching" in plan:
        return _load_branches(folder, plan)
    runs = [
        Run(folder / r["folder"], r["arm"], r["condition"], str(r["seed"]), str(r.get("branch", "")))
        for r in plan["runs"]
    ]
    if plan["baseline"] not in {run.arm for run in runs}:
        raise TypeError(f"baseline={plan['baseline']!r} is none of its arms")
    return Study(plan["question"], runs, plan["baseline"])


def _load_branches(folder: Path, plan: Mapping[str, Any]) -> Study:
    runs: list[Run] = []
    unfinished, damage = {}, []
    for planned in plan["runs"]:
        place, arm, labels = folder / planned["folder"], planned["arm"], (planned["condition"], str(planned["seed"]))
        trajectory = Run(place, "trajectory", *labels)
        rows = trajectory._read("branches.jsonl", lambda row: [key for key in row if not _is_of_branch(key, row[key])])
        starts = {row["state"]: row for row in rows if not row["arm"]}
        for state, start in starts.items():
            own = [row for row in rows if (row["arm"], row["state"]) == (arm, state)]
            if own:
                record = {**trajectory.record, "config": trajectory.record.get("arms", {}).get(arm, {})}
                runs.append(Branch(place, arm, *labels, str(state), [start, *own], record))
        if not trajectory.finished:
            unfinished[trajectory.label] = f"{trajectory.label}: {trajectory.status}, {len(starts)} states branched"
        damage += trajectory.damage
    return Study(plan["question"], runs, plan["baseline"], plan["branching"], list(unfinished.values()), damage)


def _is_of_branch(key: str, value: Any) -> bool:
    return isinstance(value, str) if key in ("arm", "failed") else _is_numbers(value)
