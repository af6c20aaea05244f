"""The command line: what a user types, what comes back, and with which exit code."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm import main as module
from jaxrl_llm.check import doubts, fits
from jaxrl_llm.config import start_up
from jaxrl_llm.ground.signals import Stopped
from jaxrl_llm.objectives import registry
from jaxrl_llm.records import run_log
from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.report.compare import together
from jaxrl_llm.report.tables import config_table
from jaxrl_llm.run import assembly, opening, trainer
from jaxrl_llm.run.settings import Settings
from tests.reference import tiny_run

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass
class Built:
    """A run that compiles nothing."""

    settings: Settings
    made_from: dict = dataclasses.field(default_factory=dict)


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Runs main in this process on a config and DIR; returns (exit code, printed, printed on standard error)."""
    monkeypatch.chdir(tmp_path)  # where there is no configs/
    monkeypatch.setattr(start_up, "start_jax", lambda: None)
    monkeypatch.setattr(assembly, "build", lambda settings: Built(settings))
    monkeypatch.setattr(doubts, "of_run", lambda run: doubts.Survey({}, {}))
    monkeypatch.setattr(fits, "fits", lambda *_: fits.Fits({"parameters": 1}, {"update": 1}, available=None))
    monkeypatch.setattr(opening, "opening", lambda *_: "")
    monkeypatch.setattr(run_log.RunLog, "note", lambda *_: None)

    def run(*arguments, config="grpo:smoke", workdir=tmp_path / "run"):
        code = module.main([f"--config={config}", f"--workdir={workdir}", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def train(monkeypatch):
    """Puts a function of (settings, log, identity) in the place of training."""
    return lambda function: monkeypatch.setattr(trainer, "train", lambda run, *rest: function(run.settings, *rest))


def trained(settings, log, identity):
    """Training in a moment: rows of every step, and folders where checkpoints are."""
    for step in range(settings.steps + 1):
        log.metrics(step, {"reward/mean": 0.5})
        log.samples(step, [{"prompt": "1="}])
    (log.workdir / "checkpoints" / str(settings.steps)).mkdir(parents=True, exist_ok=True)
    return {"eval/greedy": 0.5, "steps": settings.steps}


def test_a_run_leaves_its_config_and_its_result(command, train, tmp_path):
    train(lambda settings, log, identity: {"eval/greedy": 0.5, "steps": settings.steps})
    assert command("--config.optimizer.learning_rate=0.5", "--config.steps", "2") == (0, "", "")
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == {"eval/greedy": 0.5, "steps": 2}
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["config"]["optimizer"]["learning_rate"] == 0.5
    assert recorded["source"] == {"file": str(ROOT / "configs" / "grpo.py"), "variant": "smoke", "recipe": ""}
    assert list(recorded["code"]) == [str(ROOT / "configs" / "grpo.py")]
    assert {"config_hash", "commit", "versions", "device", "devices", "cores"} <= recorded.keys()


def test_a_dir_of_another_format_is_refused_with_its_commit(command, train, tmp_path):
    train(trained)
    assert command()[0] == 0
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    del record["format"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(record | {"commit": "ae394b4"}))
    code, _, error = command("--config.steps=9")
    assert code == 2
    assert error.startswith(f"error: {tmp_path / 'run'} was made by commit ae394b4, whose format")


def test_configs_are_compared_by_what_a_recipe_of_ones_own_had(command, train, tmp_path, monkeypatch):
    """The file is that of docs/objectives.md; whoever compares the DIRs has not run it."""
    page = (ROOT / "docs" / "objectives.md").read_text()
    own = tmp_path / "tempered.py"
    own.write_text(
        next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Tempered" in code)
    )
    train(trained)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_RECIPES", dict(registry._RECIPES))
        for name, *field in (("a",), ("b", "--config.objective.power=0.5"), ("c", "--config.objective.power=0.3")):
            assert command(*field, config=f"{own}:smoke", workdir=tmp_path / name)[0] == 0
    assert config_table(together([tmp_path / "a", tmp_path / "b"])) == (["arm"], [])
    varying = config_table(together([tmp_path / "a", tmp_path / "c"]))
    assert varying == (["arm", "objective.power"], [["a", "0.5"], ["c", "0.3"]])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_stopped_run_says_how_to_go_on(command, train, tmp_path, number, code):
    def interrupted(settings, log, identity):
        (log.workdir / "checkpoints" / saved).mkdir(parents=True, exist_ok=True)
        raise Stopped("stopped after step 3", number)

    train(interrupted)
    saved = "none yet"
    assert command() == (code, "\nstopped after step 3\n", "")
    saved = "3"
    line = f"python -m jaxrl_llm.main --config=grpo:smoke --workdir={tmp_path / 'run'}"
    said = f"\nstopped after step 3; to go on from the newest checkpoint: {line}\n"
    assert command() == (code, said, "")
    assert command("--restart") == (code, said, "")
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("error", [ValueError, OSError, FloatingPointError])
def test_an_error_in_training_is_one_line_and_exit_code_1(command, train, error):
    def fails(*args):
        raise error("step 7: what happened;\n what to do")

    train(fails)
    assert command() == (1, "", "error: step 7: what happened; what to do\n")


def test_what_training_would_refuse_is_refused_before_anything_is_written(command, train, tmp_path, monkeypatch):
    def refuses(settings):
        raise ValueError("mesh is too large")

    train(None)
    monkeypatch.setattr(assembly, "build", refuses)
    assert command() == (2, "", "error: mesh is too large\n")
    assert not (tmp_path / "run").exists()


def test_a_lost_dir_comes_back_from_the_place_of_its_checkpoints(command, train, tmp_path):
    def trains(settings, log, identity):
        assert not (log.workdir / "checkpoints").exists()
        checkpoints = Checkpoints(log.workdir)
        seen.append(checkpoints.latest)
        for step in range((checkpoints.latest or -1) + 1, settings.steps + 1):
            log.metrics(step, {"reward/mean": float(step)})
        checkpoints.save(settings.steps, {"a": np.zeros(1)}, {"config_hash": identity})
        checkpoints.close()
        return {}

    train(trains)
    seen, place, run = [], f"--checkpoints={tmp_path / 'far'}", tmp_path / "run"
    assert command(place, "--config.steps=2")[0] == 0
    rows = (run / "metrics.jsonl").read_text()
    shutil.rmtree(run)
    code, said, _ = command(place, "--config.steps=4")
    assert (code, seen) == (0, [None, 2])
    assert f"{run} has its files of step 2 back from {tmp_path / 'far'}" in said
    assert (run / "metrics.jsonl").read_text().startswith(rows)
    assert command("--config.steps=6")[0] == 0  # the DIR knows the place
    assert seen == [None, 2, 4]
    shutil.rmtree(run)
    code, _, error = command(place, "--config.seed=1")
    assert (code, run.exists()) == (2, False)
    assert "config.json is lost; its checkpoints have config_hash" in error
    assert command(place, "--config.seed=1", "--restart")[0] == 0  # they are erased there
    assert seen == [None, 2, 4, None]


def test_the_place_of_another_dir_is_refused_before_anything_is_brought_back(command, train, tmp_path):
    def trains(settings, log, identity):
        log.metrics(1, {"reward/mean": 0.5})
        checkpoints = Checkpoints(log.workdir)
        checkpoints.save(1, {"a": np.zeros(1)}, {"config_hash": identity})
        checkpoints.close()
        return {}

    train(trains)
    place, other = f"--checkpoints={tmp_path / 'far'}", tmp_path / "other"
    assert command(place)[0] == 0
    code, said, error = command(place, workdir=other)
    assert (code, said, other.exists()) == (2, "", False)
    assert f"is the PLACE of {tmp_path / 'run'}; give another, or go on with that --workdir" in error


def test_a_bucket_is_no_dir(command, train, tmp_path, capsys):
    train(None)
    with pytest.raises(SystemExit, match="2"):
        command(workdir="gs://bucket/run")
    error = capsys.readouterr().err
    assert error.startswith("error: argument --workdir: gs://bucket/run is no folder of this machine, and a DIR is")
    assert "give --workdir runs/NAME --checkpoints gs://bucket/run" in error
    assert not list(tmp_path.iterdir())
    assert "has the scheme s3; give a folder" in command("--checkpoints=s3://bucket/run")[2]


def test_a_dir_without_a_step_may_be_overwritten(command, train, tmp_path):
    def fails(settings, log, identity):
        log.metrics(0, {"eval/greedy": 0.1})
        (log.workdir / "reference").mkdir()
        raise ValueError("too late")

    train(fails)
    assert command("--config.seed=1")[0] == 1
    train(trained)
    assert command("--config.seed=2")[0] == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["seed"] == 2
    assert not (tmp_path / "run" / "reference").exists()  # it was that of another seed


def test_a_dir_of_another_config_is_refused_with_the_fields_that_differ(command, train, tmp_path):
    train(trained)
    assert command()[0] == 0
    code, _, error = command("--config.seed=1", "--config.optimizer.learning_rate=0.5", "--config.steps=9")
    assert code == 2
    assert "run holds a run of another config (optimizer.learning_rate: 0.00015 -> 0.5, seed: 0 -> 1); give" in error
    code, _, error = command("--config.task.name=countdown")
    assert "task.name: sort -> countdown, task.options.digits: 3 -> absent);" in error
    assert command("--config.steps=9", "--config.log.samples=0")[0] == 0  # may change on resume
    assert command("--config.seed=1", "--restart")[0] == 0


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_run_whose_rates_end_with_its_steps_does_not_grow(command, train, tmp_path, schedule):
    """It says why and what to do; of a constant rate the same DIR grows (above)."""
    train(trained)
    flag = f"--config.optimizer.schedule={schedule}"
    assert command(flag)[0] == 0
    code, _, error = command(flag, "--config.steps=9")
    assert code == 2
    assert (
        f"run holds a run of another config (steps: 3 -> 9); with optimizer.schedule={schedule} every rate depends on "
        "`steps`, which only optimizer.schedule=constant lets grow: give the old number, or train on from an export of "
        "this run (model.pretrained) in another --workdir"
    ) in error


def test_a_lost_or_wrong_config_json_locks_nobody_out(command, train, tmp_path):
    """The checkpoints say whose DIR it is, before anything is written; erasing them is never the advice."""

    def saves(settings, log, identity):
        trained(settings, log, identity)
        shutil.rmtree(log.workdir / "checkpoints")
        checkpoints = Checkpoints(log.workdir)
        checkpoints.save(2, {"a": np.zeros(1)}, {"config_hash": identity})
        checkpoints.close()
        return {}

    train(saves)
    record = tmp_path / "run" / "config.json"
    assert command()[0] == 0
    original = record.read_text()
    train(trained)
    for damage in (None, '{"config": {', '{"config": 1}'):
        record.unlink() if damage is None else record.write_text(damage)
        code, _, error = command("--config.seed=1")
        assert (code, record.exists()) == (2, damage is not None)
        assert "--restart" not in error
        assert ("config.json is lost" in error) == (damage is None)
        (tmp_path / "run" / "result.json").unlink()
        assert command("--config.steps=9")[0] == 0
        assert json.loads(record.read_text())["config_hash"] == json.loads(original)["config_hash"]
    record.write_text(json.dumps(json.loads(original) | {"config_hash": "another"}))
    assert command("--config.steps=10")[0] == 0  # another start had written its own
    record.unlink()
    for path in (tmp_path / "run" / "checkpoints").rglob("metadata"):
        path.write_bytes(b"")
    code, _, error = command("--config.steps=11")
    assert (code, record.exists(), "--restart" in error) == (2, False, False)


def test_logs_are_not_erased_because_checkpoints_are_gone(command, train, tmp_path):
    train(trained)
    run = tmp_path / "run"
    assert command()[0] == 0
    shutil.rmtree(run / "checkpoints")
    rows = (run / "metrics.jsonl").read_text()
    code, _, error = command()
    assert code == 2
    assert (run / "metrics.jsonl").read_text() == rows
    assert (run / "result.json").exists()
    assert "4 rows of metrics.jsonl, 4 of samples.jsonl, the TensorBoard events, result.json; bring its folder" in error
    assert "--restart" in error
    (run / "checkpoints").mkdir()  # emptied
    assert command()[0] == 2
    (run / "result.json").unlink()
    assert command("--config.steps=2")[0] == 0  # 3 rows at a checkpoint every 2 steps: killed before the first
    (run / "checkpoints" / "2").rmdir()
    (run / "result.json").unlink()
    rows = (run / "metrics.jsonl").read_text() + '{"step": 5}\n'
    (run / "metrics.jsonl").write_text(rows)
    assert command()[0] == 2  # past the second checkpoint
    assert (run / "metrics.jsonl").read_text() == rows
    (run / "evaluation.jsonl").touch()
    assert command("--restart")[0] == 0
    assert not (run / "evaluation.jsonl").exists()


@pytest.mark.slow
def test_the_command_in_a_process_of_its_own(tmp_path):
    """The smoke run from the command line on one of four devices, then its second call, which finds it complete."""
    arguments = [
        f"--config.task.data_dir={tmp_path / 'data'}",
        f"--config.warm_start.cache_dir={tmp_path / 'cache'}",
    ]
    command = [sys.executable, "-m", "jaxrl_llm.main", "--config", "configs/gspo.py:smoke"]
    command += ["--workdir", str(tmp_path / "run"), *arguments]
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        assert 0 <= result["eval/greedy"] <= 1
        assert [row["step"] for row in tiny_run.metrics(tmp_path / "run")] == [0, 1, 2, 3]
