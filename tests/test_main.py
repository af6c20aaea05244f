"""The command line: what a user types, what comes back, and with which exit code."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from absl import app, flags

from jaxrl_llm import main as module
from jaxrl_llm import provenance
from tests.reference import tiny_run

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # ml_collections reads configs so


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Runs main in this process on a config and DIR; returns (exit code, printed, printed on standard error)."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(provenance, "start_jax", lambda: None)

    def run(*arguments, config="configs/grpo.py:smoke", workdir=tmp_path / "run"):
        typed = ["main", f"--config={config}", f"--workdir={workdir}", *arguments]
        monkeypatch.setattr(sys, "argv", typed)  # where ml_collections looks for fields that are set
        try:
            rest = module.parse(typed)
            code = module.main(rest)
        finally:
            flags.FLAGS.unparse_flags()
            for name in [name for name in flags.FLAGS if name.startswith("config.")]:
                delattr(flags.FLAGS, name)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def train(monkeypatch):
    """Puts a function in the place of training."""
    return lambda function: monkeypatch.setattr(module, "train", function)


def test_a_run_leaves_its_config_and_its_result(command, train, tmp_path):
    train(lambda settings, log, identity: {"eval/greedy": 0.5, "steps": settings.steps})
    assert command("--config.optimizer.learning_rate=0.5", "--config.steps=2") == (0, "", "")
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == {"eval/greedy": 0.5, "steps": 2}
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["config"]["optimizer"]["learning_rate"] == 0.5
    assert {"config_hash", "commit", "versions", "device", "devices", "cores"} <= recorded.keys()


def test_ctrl_c_says_how_to_go_on(command, train, tmp_path):
    def interrupted(*args):
        raise KeyboardInterrupt("stopped after step 3")

    train(interrupted)
    code, printed, _ = command()
    assert code == 130
    assert "stopped after step 3; the same command resumes from the newest checkpoint in" in printed
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("error", [ValueError, OSError, FloatingPointError])
def test_an_error_is_one_line(command, train, error):
    def fails(*args):
        raise error("step 7: what happened; what to do")

    train(fails)
    assert command() == (1, "", "error: step 7: what happened; what to do\n")


def test_bad_input_is_refused_before_anything_is_written(command, train, tmp_path):
    train(None)
    for argument, message in (
        ("--config.updates.minibatches=3", "error: updates.minibatches=3 must divide"),
        ("--config.objective.name=grop", "grpo"),
        ("--config.rollout.top_k=4", "rollout.allow_truncated=True"),
    ):
        code, _, error = command(argument)
        assert code == 1
        assert message in error
    assert not (tmp_path / "run").exists()


def test_a_dir_of_another_config_is_refused(command, train):
    train(lambda *args: {})
    assert command()[0] == 0
    code, _, error = command("--config.seed=1")
    assert code == 1
    assert re.search(r"holds a run of another config \(hash \w+, this one is \w+\); give another --workdir", error)
    assert command("--config.steps=9", "--config.log.samples=0")[0] == 0  # may change on resume


def test_a_dir_that_cannot_be_written_is_named(command, train, tmp_path):
    train(None)
    (tmp_path / "file").write_text("")
    code, _, error = command(workdir=tmp_path / "file" / "run")
    assert code == 1
    assert "cannot be written" in error
    assert "give another --workdir" in error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"argument": "--config.optimizer.learning_rat=0.5"}, 'Did you mean "learning_rate" instead of "learning_rat"'),
        ({"argument": "--config.updates.minibatches=1e3"}, "--config.updates.minibatches=1e3: invalid literal for int"),
        ({"argument": "--workdri=x"}, "Unknown command line flag 'workdri'. Did you mean: workdir"),
        ({"config": "configs/grpo.py:nonsense"}, "unknown variant 'nonsense'; this config has 'smoke' or none"),
    ],
)
def test_an_unknown_field_flag_or_variant_is_named(command, capsys, given, message):
    argument = given.pop("argument", None)
    with pytest.raises(SystemExit) as stop:
        command(*([argument] if argument else []), **given)
    assert stop.value.code == 1
    assert message in capsys.readouterr().err


def test_other_arguments_are_refused(command):
    with pytest.raises(app.UsageError, match="fields are set as --config"):
        command("steps=3")


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
