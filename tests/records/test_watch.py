"""Warnings about a run that goes on: when each begins and ends, and that a resume sees what the run would have seen."""

import io

import pytest

from jaxrl_llm.records.run_log import RunLog, read_rows
from jaxrl_llm.records.watch import TEXTS, Watch


def rows(*rewards, **other):
    """A row a rollout with (mean, deviation) of its rewards."""
    summed = {"reward/verifier_weighted": 0.0} | other
    return [{"reward/mean": mean, "reward/std": std} | summed for mean, std in rewards]


def held(rows):
    """The warnings that hold after each row."""
    watch = Watch()
    return [list(watch.after(row)) for row in rows]


GOOD, BAD = (0.5, 0.5), (0.04, 0.2)
CASES = {
    "all 0": (rows(*[(0.0, 0.0)] * 11), 10, ["rewards_zero"]),
    "all 1": (rows(*[(1.0, 0.0)] * 11), 10, ["rewards_equal"]),
    "all 0.1 in float32": (rows(*[(0.1, 1e-9)] * 11), 10, ["rewards_equal"]),
    "equal, not always the same": (rows(*[(0.0, 0.0), (1.0, 0.0)] * 6), 10, ["rewards_equal"]),
    "costs that are equal": (rows(*[(-1.0, 0.0)] * 11), 10, ["rewards_equal"]),
    "a fall": (rows(*[GOOD] * 3, *[BAD] * 11), 13, ["reward_collapse"]),
    "a fall to 0": (rows(*[GOOD] * 3, *[(0.0, 0.0)] * 11), 13, ["rewards_zero", "reward_collapse"]),
    "no group was kept": (rows(*[(0.0, 0.0)] * 11, **{"reward/verifier_weighted": None}), 10, ["rewards_zero"]),
}
SILENT = {
    "learns": rows(*[(step / 20, 0.3) for step in range(20)]),
    "half of the best": rows(*[GOOD] * 3, *[(0.25, 0.4)] * 20),
    "nine rollouts": rows(*[(0.0, 0.0)] * 9, GOOD, *[(0.0, 0.0)] * 9),
    "costs": rows(*[(-1.0, 0.5)] * 3, *[(-20.0, 0.5)] * 20),
    "supervised": [{"loss/policy": 1.0}] * 20,
    "a reward model alone": [{"reward/mean": 0.0, "reward/std": 0.0}] * 20,
    "not finite": rows(*[(None, None)] * 20),  # which stops a run by itself
}


@pytest.mark.parametrize("case", CASES)
def test_a_warning_begins_after_ten_rollouts(case):
    given, first, names = CASES[case]
    after = held(given)
    assert after[: first - 1] == [[]] * (first - 1)
    assert after[first - 1 :] == [names] * (len(given) - first + 1)
    assert held([*given, *rows(GOOD)])[-1] == []  # and ends


@pytest.mark.parametrize("counted", ["reward/verifier_errors", "reward/verifier_timeouts"])
def test_a_verifier_that_fails_and_rewards_nothing_is_named_at_once(counted):
    fails = {counted: 16.0}
    assert held(rows((0.0, 0.0), GOOD, **fails)) == [["verifier_fails"], []]
    assert held(rows((0.0, 0.0), **{counted: 0.0})) == [[]]


def test_updates_that_are_rounded_away_are_named_at_once():
    """Whatever is learnt from, and until an update moves the parameters; one without a gradient says nothing."""
    moved = [{"update/moved": share} for share in (0.02, None, 0.1, 0.0999)] + [{"eval/greedy": 0.5}]
    assert held(moved) == [["updates_rounded"]] * 2 + [[]] + [["updates_rounded"]] * 2
    assert held(rows((0.5, 0.5), **{"update/moved": 0.02})) == [["updates_rounded"]]
    for word in ("update/moved", "model.param_dtype=float32", "bfloat16"):
        assert word in TEXTS["updates_rounded"]


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_said_of_a_healthy_run(case):
    assert held(SILENT[case]) == [[]] * len(SILENT[case])


def test_every_row_names_them_and_the_screen_says_each_once(tmp_path):
    """The evaluation of step 0 has no rewards; a resume says again what holds, at the step where it begins."""
    given = [{"eval/greedy": 0.0}, *rows(*[(0.0, 0.0)] * 12)]
    whole, parts, said = tmp_path / "whole", tmp_path / "parts", {}
    for workdir, stops in ((whole, [13]), (parts, [5, 13])):
        for start, stop in zip([0, *stops], stops, strict=False):
            said[workdir] = io.StringIO()
            with RunLog(workdir, total_steps=13, stream=said[workdir]) as log:
                log.cut(start - 1)
                log.warn({"splits_overlap": "7 of 7"})
                for step in range(start, stop):
                    log.metrics(step, given[step])
    found = [row["log/warnings"] for row in read_rows(whole / "metrics.jsonl")]
    assert found == [["splits_overlap"]] * 10 + [["splits_overlap", "rewards_zero"]] * 3
    assert read_rows(whole / "metrics.jsonl") == read_rows(parts / "metrics.jsonl")
    lines = [line.split(":")[0] for line in said[whole].getvalue().splitlines() if line.startswith("warning")]
    assert lines == ["warning splits_overlap", "warning rewards_zero"]
    assert said[parts].getvalue().count("warning") == 2
    assert "log/warnings" not in _row_without(tmp_path / "none")


def _row_without(workdir):
    with RunLog(workdir, total_steps=1, stream=io.StringIO()) as log:
        log.metrics(1, rows(GOOD)[0])
    return read_rows(workdir / "metrics.jsonl")[0]
