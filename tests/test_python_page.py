"""docs/python.md: at most thirty lines that train, sample, score, replay and update, and print numbers."""

import math
import re

import pytest

from tests.reference.page_commands import ROOT, blocks


@pytest.mark.slow
def test_the_page_runs_and_prints_numbers(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (code,) = blocks(ROOT / "docs" / "python.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    names: dict = {"__name__": "documented"}
    exec(code, names)
    assert names["gap"] < 1e-4  # the experts are those of the sampler, so both compute the same network
    assert 0 < names["rewards"]["verifier"].mean() < 1
    assert abs(names["before"]) < 1e-5  # every ratio is 1, and the advantages of a group sum to 0
    assert names["after"] < names["before"]
    assert 0 < float(names["metrics"]["kl/old"]) < 0.1
    printed = capsys.readouterr().out
    again = names["train"]("grpo:smoke", "runs/python", {"warm_start.steps": 60})  # finished: what it reached
    assert f"{again}\n" in printed
    assert re.search(r"\{'eval/greedy': [\d.]+, ", printed)
    assert math.isclose(float(printed.rsplit(" ", 1)[1]), float(names["metrics"]["kl/old"]))
