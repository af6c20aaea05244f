"""Runs side by side: what they are called, what is printed, and what is refused."""

import json
from pathlib import Path

import pytest

from jaxrl_llm.report.compare import main, together
from jaxrl_llm.report.samples import side_by_side
from tests.reference.synthetic_runs import write_rows


def write(folder, name, *, end=0.5, answers=("12", "21"), **fields):
    """A DIR with a config, a reward and its answers to the prompts 21= and 12= at steps 0 and 1."""
    record = {"config": {"objective": {"name": name}, **fields}}
    ends = [{"step": step, "reward/mean": end, "eval/greedy": end} for step in (0, 1)]
    write_rows(folder, ends, result={}, config=record)
    rows = [
        {"step": step, "prompt": prompt, "greedy": answer, "reward": float(answer == "12"), "split": "test"}
        for step in (0, 1)
        for prompt, answer in zip(("21=", "12="), answers, strict=True)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    write(folder / "one", "grpo", steps=3, seed=1)
    write(folder / "two", "gspo", answers=("12", "12"), steps=3, seed=2)
    return folder


def test_two_dirs_side_by_side(compared, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([str(compared / "one"), str(compared / "two"), "--out", str(compared / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if str(compared) not in line) <= 80
    fields = dict(line.split(maxsplit=1) for line in lines if line.startswith(("objective", "steps", "seed")))
    assert fields["objective.name"].split() == ["grpo", "gspo"]
    assert fields["seed"].split() == ["1", "2"]
    assert "steps" not in fields  # equal in both
    told = lines.index("held-out prompts at step 1, answers with rewards")
    assert [line.split() for line in lines[told + 1 : told + 4]] == [
        ["12="],
        ["one", "21", "(0)"],
        ["two", "12", "(1)"],
    ]
    page = (compared / "out" / "comparison.md").read_text()
    assert "# Comparison of one, two" in page
    assert "| 12= | 21 (0) | 12 (1) |" in page
    assert not list((compared / "one").glob("report*"))  # a DIR is only read


def test_folders_are_arms_and_their_numbered_folders_seeds(tmp_path):
    for seed in "01":
        write(tmp_path / "a" / seed, "grpo")
        write(tmp_path / "b" / "GSPO" / seed, "gspo")
        write(tmp_path / "b" / "GRPO" / seed, "grpo")
    study = together([tmp_path / "b", tmp_path / "a"])
    assert study.arms == ["b/GRPO", "b/GSPO", "a"]
    assert [(run.arm, run.seed) for run in study.runs][-2:] == [("a", "0"), ("a", "1")]
    (tmp_path / "c").mkdir()
    write(tmp_path / "c" / "a", "grpo")
    paths = [tmp_path / "a", tmp_path / "c" / "a"]
    assert together(paths).arms == [str(path) for path in paths]  # two folders of one name


def test_prompts_are_matched_by_step(tmp_path):
    write(tmp_path / "one", "grpo")
    write(tmp_path / "two", "gspo", answers=("2", "3"))
    early = (tmp_path / "two" / "samples.jsonl").read_text().splitlines()[:2]
    (tmp_path / "two" / "samples.jsonl").write_text("\n".join(early) + "\n")
    (shared,) = side_by_side(together([tmp_path / "one", tmp_path / "two"]).runs)
    assert (shared.split, shared.step) == ("held-out", 0)
    assert shared.rows == [("21=", [("12", 1.0), ("2", 0.0)]), ("12=", [("21", 0.0), ("3", 0.0)])]


def test_a_damaged_dir_is_named_and_the_rest_shown(tmp_path, capsys):
    write(tmp_path / "one", "grpo")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "metrics.jsonl").write_text("{]\n")
    assert main([str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "damaged files, of which what can be read is shown:" in printed
    assert str(Path("two") / "metrics.jsonl") in printed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["one"], "DIR=one is the only one; name two or more"),
        (["one", "two", "./one"], "DIR=one is given twice"),
        (["one", "gone"], "DIR=gone holds no run"),
        (["one", "two", "--out=two"], "--out=two is one of the DIRs"),
        ([], "the following arguments are required: DIR"),
    ],
)
def test_what_is_refused(compared, capsys, monkeypatch, given, said):
    monkeypatch.chdir(compared)
    try:
        code = main(given)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1)
    assert said in error
    assert not (compared / "comparison").exists()
