"""What processes compare before they train one run: which changes are seen, under which name, and which are not."""

import sys

import jax.numpy as jnp
import pytest

from jaxrl_llm import main
from jaxrl_llm.config import loading, start_up
from jaxrl_llm.records import provenance
from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.records.recorded import newest_checkpoint
from jaxrl_llm.run import joint_facts, joint_start
from jaxrl_llm.run.settings import validate
from tests.reference import tiny_run


def described(folder, workdir, *, restart=False, **changes):
    config = tiny_run.make_config(folder, **changes)
    return joint_facts.described(config.to_dict(), validate(config), workdir, restart=restart)


def differences(one, other):
    return [name for name in one | other if one.get(name) != other.get(name)]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, []),
        ({"optimizer.learning_rate": 1e-2}, ["config.optimizer.learning_rate"]),
        ({"evaluation.every": 7}, ["config.evaluation.every"]),
        ({"checkpoint.every": 7}, ["config.checkpoint.every"]),
        ({"log.diagnostics_every": 7}, ["config.log.diagnostics_every"]),
        ({"steps": 7}, ["config.steps"]),
        ({"log.wandb": "mine", "processes.heartbeat_timeout_s": 30, "processes.start_timeout_s": 60}, []),
        ({"task.options.digits": 4}, ["config.task.options.digits", "data of the task"]),
    ],
    ids=str,
)
def test_a_field_is_compared_by_its_name(tmp_path, changes, names):
    one, other = described(tmp_path, tmp_path), described(tmp_path, tmp_path, **changes)
    assert differences(one, other) == names


def test_a_checkpoint_is_compared_by_its_content_and_not_by_its_path(tmp_path, monkeypatch):
    monkeypatch.setattr(joint_facts, "identity_fields", lambda config: {"model": {"pretrained": "a digest"}})
    assert described(tmp_path, tmp_path)["config.model.pretrained"] == "a digest"


def test_versions_and_code_come_before_the_config(tmp_path, monkeypatch):
    """A commit or a package that differs explains the fields that do."""
    one = described(tmp_path, tmp_path)
    order = [name.split()[0].partition(".")[0] for name in one]
    first = [order.index(kind) for kind in ("version", "code", "config", "data", "newest")]
    assert first == sorted(first)
    assert {"version of jax", "version of Python", "code of jaxrl_llm/training/step.py"} <= one.keys()
    monkeypatch.setattr(provenance, "versions", lambda: {"jax": "0.0.1"})
    assert "version of jax" in differences(one, described(tmp_path, tmp_path))


def test_the_files_of_a_run_are_compared(tmp_path, monkeypatch):
    """The config's own file and one that a field names."""
    own = tmp_path / "mine.py"
    own.write_text("def get_config(variant=''): return None")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    loading.load_module(own)
    rule = tmp_path / "rule.py"
    rule.write_text("def reward(): return 1")
    options = {"task.name": "jsonl", "task.options": {"verifier": f"{rule}:reward"}}
    monkeypatch.setattr(joint_facts.tasks, "data_name", lambda task: "data")
    config = tiny_run.make_config(tmp_path)
    settings = validate(config)
    with config.unlocked():
        config.task.options = options["task.options"]
    one = joint_facts.described(config.to_dict(), settings, tmp_path)
    for file, name in ((own, "code of mine.py"), (rule, "code of rule.py")):
        before = file.read_text()
        file.write_text(before + "\n")
        assert differences(one, joint_facts.described(config.to_dict(), settings, tmp_path)) == [name]
        file.write_text(before)


def test_the_checkpoint_to_go_on_from_is_compared(tmp_path):
    """Its step and its digest; --restart goes on from none, and is not the same as a first start."""
    name = "newest checkpoint"
    assert newest_checkpoint(tmp_path) == "none"
    seen = ["none"]
    for step, folder in ((1, "a"), (1, "b"), (2, "b")):
        checkpoints = Checkpoints(tmp_path / folder)
        checkpoints.save(step, {"x": jnp.full(3, ord(folder))}, {})
        checkpoints.close()
        seen.append(described(tmp_path, tmp_path / folder)[name])
    assert [text.partition(",")[0] for text in seen] == ["none", "step 1", "step 1", "step 2"]
    assert len(set(seen)) == 4
    (tmp_path / "b" / "checkpoints" / "2" / "payload" / "metadata").write_text("{")
    assert newest_checkpoint(tmp_path / "b") == "step 2, damaged"
    assert described(tmp_path, tmp_path / "b", restart=True)[name] == "none, with --restart"


def test_a_command_compares_before_it_looks_at_its_dir(tmp_path, monkeypatch, capsys):
    """All processes end with exit code 2, and nothing is written."""
    given = []

    def check(config, settings, workdir, *, restart):
        given.append((config["steps"], settings.steps, workdir, restart))
        raise ValueError("the processes do not run the same")

    monkeypatch.setattr(joint_start, "check", check)
    monkeypatch.setattr(start_up, "start_jax", lambda: None)
    workdir = str(tmp_path / "run")
    assert main.main(["--config=grpo:smoke", f"--workdir={workdir}", "--config.steps=3", "--restart"]) == 2
    assert given == [(3, 3, workdir, True)]
    assert capsys.readouterr().err == "error: the processes do not run the same\n"
    assert not (tmp_path / "run").exists()


def test_one_process_compares_nothing(tmp_path, monkeypatch):
    config = tiny_run.make_config(tmp_path)
    monkeypatch.setattr(joint_facts, "described", None)  # would fail
    joint_start.check(config.to_dict(), validate(config), tmp_path)
