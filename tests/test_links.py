"""Nothing is written through a symbolic link of a DIR: not by a run, a sweep, an evaluation or a report."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import evaluation
from jaxrl_llm.records import checkout
from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.records.run_log import RunLog, add_rows, keep_rows
from jaxrl_llm.report.page import Page
from jaxrl_llm.report.write import write_report
from jaxrl_llm.sweep.__main__ import main as sweep
from jaxrl_llm.training.pairs import computed_once
from tests.reference.fake_program import PROGRAM
from tests.reference.small_sweeps import sweep_file
from tests.reference.synthetic_runs import write_run

FILES = {
    *(".lock", "checkpoints_at", "config.json", "evaluation.jsonl", "metrics.jsonl", "metrics.jsonl.damaged"),
    *("samples.jsonl", "result.json", "report.md", "report.html", "interactive.html", "figures/curves.png"),
    *("tables/arms.csv", "reference/pairs.npy", "checkpoints/1", "local/0/checkpoints/1", "damaged_checkpoints/2"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A DIR with a file of each kind that its run, its evaluation and its report leave."""
    workdir = tmp_path_factory.mktemp("links") / "run"
    write_run(workdir, steps=10, keys=("eval/", "reward/"))
    with RunLog(workdir, 1) as log:
        log.metrics(11, {"reward/mean": 0.5})
    for folder in (workdir, workdir / "local" / "0"):
        checkpoints = Checkpoints(folder, keep=2)
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.zeros(2)}, {})
        checkpoints.wait()
        checkpoints.set_aside(after=1)
        checkpoints.close()
    computed_once(workdir / "reference" / "pairs.npy", (2,), lambda: np.zeros(2))
    (workdir / "checkpoints_at").write_text(f"{workdir}\n")
    with (workdir / "metrics.jsonl").open("a") as rows:
        rows.write("{\n")
    keep_rows(workdir / "metrics.jsonl", lambda row: True)
    add_rows(workdir / "evaluation.jsonl", [{"step": 1}])
    write_report(workdir)
    return workdir


def train(workdir):
    RunLog(workdir, 9).close()


# The folders that each command writes into besides the DIR itself.
WRITES = {
    train: {"checkpoints", "damaged_checkpoints", "local", "reference"},
    Page: {"figures", "tables"},
    lambda workdir: evaluation.main(["--workdir", str(workdir)]): set(),
}


@contextlib.contextmanager
def link(path, to):
    """A symbolic link in place of the file or folder, which is back afterwards."""
    aside = to.with_name("aside")
    path.rename(aside)
    path.symlink_to(to)
    yield
    path.unlink()
    aside.rename(path)


def said_by(write, workdir, capsys):
    """The line of a command that is refused, or the text of the exception of a function."""
    try:
        assert write(workdir) == 2
    except ValueError as error:
        return str(error)
    return capsys.readouterr().err


def test_a_link_in_place_of_any_file_of_a_dir_is_refused(whole, tmp_path, capsys):
    """By every command that writes there, before it writes anything."""
    precious, paths = tmp_path / "precious", sorted(whole.rglob("*"))
    precious.write_text("mine")
    assert {str(path.relative_to(whole)) for path in paths} >= FILES
    for path in paths:
        parts = path.relative_to(whole).parts
        with link(path, precious):
            for write, folders in WRITES.items():
                if len(parts) == 1 or parts[0] in folders:
                    assert f"{path} is a symbolic link to {precious}" in said_by(write, whole, capsys)
    assert precious.read_text() == "mine"


def test_a_link_in_the_dir_of_a_sweep_is_refused(tmp_path, monkeypatch, capsys):
    """Its own files, the folders of its arms and runs, and what these hold."""
    monkeypatch.setattr(checkout, "changed", lambda: [])
    precious, workdir = tmp_path / "precious", tmp_path / "study"
    precious.write_text("mine")
    arguments = ["--sweep", str(sweep_file(tmp_path)), "--workdir", str(workdir), "--launcher", "none"]
    assert sweep(arguments, PROGRAM) == 0
    (workdir / "A" / "0").mkdir(parents=True)
    (workdir / "A" / "0" / "process.log").write_text("")
    assert {path.name for path in workdir.iterdir()} == {".sweep.lock", "sweep.json", "commands.txt", "A"}
    for path in sorted(workdir.rglob("*")):
        capsys.readouterr()
        with link(path, precious):
            assert sweep(arguments, PROGRAM) == 2
            assert f"{path} is a symbolic link to {precious}" in capsys.readouterr().err
    assert precious.read_text() == "mine"
