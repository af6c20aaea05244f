"""Answers worth reading: the same prompt before and after training, and remaining failures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.report.read import Run, Study

_KINDS = ("broken", "still wrong", "fixed", "still right")  # in the order in which a reader should see them


@dataclass(frozen=True)
class Change:
    """The answer to one held-out prompt at the first and at the last evaluation, with its rewards."""

    prompt: str
    before: str
    before_reward: float
    after: str
    after_reward: float
    solved: float = 1.0  # the least reward of a right answer

    @property
    def kind(self) -> str:
        if self.after_reward < self.before_reward:
            return "broken"
        if self.after_reward > self.before_reward:
            return "fixed"
        return "still right" if self.after_reward >= self.solved else "still wrong"


def changes(run: Run) -> tuple[list[Change], tuple[int, int]]:
    """The greedy answers to held-out prompts at the first and the last logged evaluation, and the two steps.

    Empty, with steps (0, 0), for a run with fewer than two logged evaluations.
    """
    held_out = [row for row in run.samples if row.get("split") == "test" and "greedy" in row]
    steps = sorted({row["step"] for row in held_out})
    if len(steps) < 2:
        return [], (0, 0)
    first, last = ({row["prompt"]: row for row in held_out if row["step"] == step} for step in (steps[0], steps[-1]))
    changed = [
        Change(prompt, *answered(row), *answered(last[prompt]), run.solved)
        for prompt, row in first.items()
        if prompt in last
    ]
    return changed, (steps[0], steps[-1])


def last_answers(run: Run, count: int) -> list[dict[str, Any]]:
    """The first `count` answers to held-out prompts that the last evaluation logged."""
    held_out = [row for row in run.samples if row.get("split") == "test" and "greedy" in row]
    last = max((row["step"] for row in held_out), default=0)
    return [row for row in held_out if row["step"] == last][:count]


def pick(changed: Sequence[Change], count: int) -> list[Change]:
    """At most `count` changes: one of every kind in turn, those that broke or stayed wrong first."""
    queues = [[one for one in changed if one.kind == kind] for kind in _KINDS]
    turns = [queue[turn] for turn in range(len(changed)) for queue in queues if turn < len(queue)]
    return sorted(turns[:count], key=lambda one: _KINDS.index(one.kind))


def failures(run: Run, count: int) -> list[Mapping[str, Any]]:
    """The logged training answers of the last step that are not right, those with the lowest rewards first."""
    drawn = [row for row in run.samples if row.get("split") != "test"]
    last = max((row["step"] for row in drawn), default=0)
    wrong: list[Mapping[str, Any]] = [row for row in drawn if row["step"] == last and answered(row)[1] < run.solved]
    return sorted(wrong, key=lambda row: answered(row)[1])[:count]


def first_sampled(study: Study) -> list[Run]:
    """The first run of every arm that logged answers."""
    shown = [run for run in study.runs if any({"greedy", "answer"} & row.keys() for row in run.samples)]
    first = {run.arm: run for run in reversed(shown)}
    return [first[arm] for arm in study.arms if arm in first]


@dataclass(frozen=True)
class SideBySide:
    """Answers to the prompts that several runs logged at one step: `answers` has one (text, reward) a run."""

    split: str
    step: int
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]  # (prompt, answers)


def side_by_side(runs: Sequence[Run]) -> list[SideBySide]:
    """The greedy answers to held-out prompts, then the training answers, at the last step with prompts in common.

    Prompts whose rewards differ come first. Of several answers of a run to a training prompt, the first counts.
    """
    found = []
    for split in ("held-out", "training"):
        logged: list[dict[tuple[int, str], tuple[str, float]]] = [{} for _ in runs]
        for run, answers in zip(runs, logged, strict=True):
            for row in run.samples:
                if {"greedy", "answer"} & row.keys() and (row.get("split") == "test") == (split == "held-out"):
                    answers.setdefault((row["step"], row["prompt"]), answered(row))
        shared = [place for place in logged[0] if all(place in answers for answers in logged)] if logged else []
        last = max((step for step, _ in shared), default=0)
        rows = [(prompt, [answers[step, prompt] for answers in logged]) for step, prompt in shared if step == last]
        if rows:
            found.append(SideBySide(split, last, sorted(rows, key=lambda row: len({r for _, r in row[1]}) == 1)))
    return found


def tally(changed: Sequence[Change]) -> str:
    """'1 broken, 2 fixed of 3 prompts'."""
    counted = Counter(one.kind for one in changed)
    return ", ".join(f"{counted[kind]} {kind}" for kind in _KINDS if counted[kind]) + f" of {len(changed)} prompts"


def answered(row: Mapping[str, Any]) -> tuple[str, float]:
    """The answer of a row of samples.jsonl, the greedy one to a held-out prompt, and its reward; NaN for null."""
    reward = row.get("reward")
    return str(row.get("greedy", row.get("answer", ""))), float("nan") if reward is None else float(reward)
