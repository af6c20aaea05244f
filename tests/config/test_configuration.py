"""Configs by name and by path, from any folder, with tasks and objectives of the user's own."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_llm import evaluation, main, objectives, tasks
from jaxrl_llm.__main__ import COMMANDS
from jaxrl_llm.config import listed, loading, start_up
from jaxrl_llm.records import own_code
from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.records.recorded import FORMAT
from jaxrl_llm.records.run_log import write_json
from jaxrl_llm.run import reopened
from jaxrl_llm.run.assembly import build
from jaxrl_llm.run.fields import declared_fields
from jaxrl_llm.run.settings import config_hash, validate
from jaxrl_llm.sweep import __main__ as sweep
from jaxrl_llm.sweep.planned import Sweep, command

ROOT = Path(__file__).parents[2]

OWN_TASK = """
from ml_collections import ConfigDict

from configs import base
from jaxrl_llm import tasks
from of_the_user import letters


@tasks.register
def {name}(*, length: int = 3) -> tasks.Task:
    return tasks.Task(
        name="{name}",
        prompt_length=length + 1,
        answer_length=length + 1,
        tokenizer=tasks.CharTokenizer(letters + "="),
        sample=lambda rng: (lambda text: (text + "=", text))("".join(rng.choice(list(letters), length))),
        verify=lambda prompt, answer, *_: float(answer == prompt.removesuffix("=")),
    )


def get_config(variant=""):
    config = base.get_config("smoke")
    config.task.name = "{name}"
    config.task.options = ConfigDict({{"length": 4, "train_size": 16, "test_size": 8}})
    return config
"""


def read(name, *fields):
    return loading.load(loading.find(name), [tuple(field.split("=", 1)) for field in fields])


def test_a_name_a_path_and_a_path_from_elsewhere_are_one_config(tmp_path, monkeypatch):
    full = read(str(ROOT / "configs" / "gspo.py")).to_dict()
    monkeypatch.chdir(tmp_path)
    assert read("gspo").to_dict() == read("configs/gspo.py").to_dict() == full
    assert loading.find("gspo:smoke") == loading.Source(str(ROOT / "configs" / "gspo.py"), "smoke")
    Path("gspo.py").write_text(
        "from configs import base\n\ndef get_config(variant=''):\n    return base.get_config()\n"
    )
    assert read("gspo.py").objective.name == "grpo"  # a file of the user's comes first
    assert read("gspo").objective.name == "gspo"


def test_a_recipe_without_a_file_is_base_with_that_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert loading.find("rspo:smoke") == loading.Source(str(ROOT / "configs" / "base.py"), "smoke", "rspo")
    expected = read("base:smoke", "objective.name=rspo").to_dict()
    assert read("rspo:smoke").to_dict() == read("configs/rspo.py:smoke").to_dict() == expected
    with pytest.raises(FileNotFoundError, match=r"or recipes \(.*rspo, .*did you mean 'rspo'"):
        loading.find("rspoo")


@pytest.mark.parametrize("name", objectives.names())
def test_every_recipe_is_a_config_that_trains(name):
    """One on pairs that has no file starts from that of dpo, since base.py samples."""
    validate(read(f"{name}:smoke"))
    on_pairs = name in objectives.names("pairs")
    assert Path(loading.find(name).file).stem in (name, "dpo" if on_pairs else "base")


def test_values_take_the_type_of_their_field():
    config = read(
        "base:smoke",
        "seed=7",
        "optimizer.learning_rate=1",
        "rewards.overlong_filter=true",
        "mesh.shape=(1, 2, 1, 1)",
        "objective.clip_low=3e-4",
        "objective.phi_pos=(1.0, 2.0)",
        "objective.std=none",
        "task.options.digits=4",
        "warm_start.cache_dir=a=b",
    )
    assert (config.seed, config.optimizer.learning_rate, config.rewards.overlong_filter) == (7, 1.0, True)
    assert (config.mesh.shape, config.objective.clip_low, config.objective.std) == ((1, 2, 1, 1), 3e-4, "none")
    assert (config.objective.phi_pos, config.task.options.digits) == ((1.0, 2.0), 4)
    assert config.warm_start.cache_dir == "a=b"
    assert read("gspo", "objective.clip_low=None").objective.clip_low is None


def test_the_options_of_a_chat_are_cleared_as_its_refusal_says():
    config = "qwen3_0_6b_gsm8k_grpo"
    for field, value, cleared in (("chat_options", {"enable_thinking": False}, {}), ("system", "Be brief.", "")):
        with pytest.raises(ValueError, match="is part of a chat") as refused:
            tasks.Prompting(**{field: value})
        remedy = str(refused.value).rpartition("--config.")[2]
        assert read(config, f"task.system={value}", remedy).to_dict()["task"][field] == cleared
    assert read(config, "task.chat_options={'a': 1}").task.chat_options.to_dict() == {"a": 1}
    assert read(config, "task.chat_options.a=1").task.chat_options.to_dict() == {"enable_thinking": False, "a": 1}


def test_another_task_does_not_inherit_options(monkeypatch):
    """base.py gives its own task `digits`, which countdown lacks; the sizes of the splits belong to every task."""
    config = read("grpo:smoke", "task.options.numbers=3", "task.name=countdown")
    assert config.task.options.to_dict() == {"numbers": 3, "train_size": 512, "test_size": 64}
    assert validate(config).task.name == "countdown"
    assert validate(read("grpo", "task.name=countdown")).task.options == tasks.make("countdown").options
    assert read("grpo:smoke", "task.name=sort").task.options.digits == 3


@pytest.fixture
def trained_elsewhere(tmp_path, monkeypatch):
    """A DIR with a checkpoint of a run whose task its own config file registers, in a process that ended."""

    def make(name):
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "of_the_user.py").write_text("letters = 'abcd'\n")
        (tmp_path / "own" / f"{name}.py").write_text(OWN_TASK.format(name=name))
        source = loading.find(f"{tmp_path / 'own' / name}.py:x")
        config = loading.load(source, [("task.data_dir", str(tmp_path / "data"))])
        run = build(validate(config))
        record = {"format": FORMAT, "config": config.to_dict(), "config_hash": config_hash(config)}
        record["source"] = {"file": source.file, "variant": source.variant}
        record["code"] = own_code.noted(source.file, config.task.options.to_dict())
        write_json(tmp_path / "run" / "config.json", record)
        checkpoints = Checkpoints(tmp_path / "run")
        checkpoints.save(1, run.blank().saved(), {})
        checkpoints.close()
        monkeypatch.delitem(tasks.named_tasks._REGISTERED, name)
        monkeypatch.setattr(start_up, "start_jax", lambda: None)
        return tmp_path / "run"

    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make


@pytest.mark.slow
def test_evaluation_finds_a_task_that_the_config_registered(trained_elsewhere, capsys):
    run = trained_elsewhere("repeat")
    arguments = [f"--workdir={run}", "--prompts=4", "--samples=2", "--k=1,2"]
    assert evaluation.main([*arguments, f"--json={run / 'told.json'}"]) == 0
    told = json.loads((run / "told.json").read_text())
    assert (told["step"], told["prompts"]) == (1, 4)
    assert json.loads((run / "evaluation.jsonl").read_text()) == told
    sentence, header, _, *rows, sampled, footer = capsys.readouterr().out.splitlines()[-10:]
    assert sentence.startswith("repeat")
    assert sampled == "sampled: at temperature 1"
    assert header.split("  ")[0] == "repeat, 4 test prompts, step 1"
    assert rows[-1].startswith("held-out accuracy, best of 2  ")
    assert all(re.search(r" \d\.\d{3} ± \d\.\d{3}$", row) for row in rows)
    assert footer == "±: half of the 95 % t interval over prompts"
    assert evaluation.main([*arguments, f"--json={run}"]) == 1
    assert "(the result above is whole, and only not recorded)" in capsys.readouterr().err
    assert evaluation.main([*arguments, "--step=99"]) == 2
    assert "no checkpoint of step 99 in" in capsys.readouterr().err


def test_a_config_file_that_is_gone_is_named(trained_elsewhere, tmp_path):
    run = trained_elsewhere("repeat_gone")
    (tmp_path / "own" / "repeat_gone.py").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"repeat_gone\.py, which registers task 'repeat_gone' and objective 'grpo'"
    ):
        reopened.restored(run)


def test_the_help_lists_every_field_with_its_comment_at_80_columns():
    text = listed.field_help()
    assert max(len(line) for line in text.splitlines()) <= 80
    names = [line.split("=")[0].strip() for line in text.splitlines() if line.startswith("  --config.")]
    assert [name.removeprefix("--config.") for name in names] == list(declared_fields())
    assert "--config.optimizer.router_factor=1.0  learning-rate factor of the router; 0:\n      frozen" in text
    assert "--config.rollout.router_noise=0.0  standard deviation of noise on" in text


def test_a_file_that_is_edited_within_a_second_is_read_again(tmp_path, monkeypatch):
    """With an equal time and size Python would take the bytecode of the text before."""
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    path = tmp_path / "edited.py"
    for text in ("value = 1", "value = 2"):
        path.write_text(text)
        os.utime(path, (1, 1))
        assert f"value = {loading.load_module(path).value}" == text


@pytest.mark.parametrize("module", [main, evaluation, sweep])
def test_help_fits_a_terminal_and_exits_with_0(module, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        module.main(["--help"])
    printed = capsys.readouterr()
    assert (stop.value.code, printed.err) == (0, "")
    assert max(map(len, printed.out.splitlines())) <= 80
    assert "exit codes: 0 done, 1 failed, 2 refused, 130 stopped by Ctrl-C, 143 by SIGTERM" in printed.out
    assert ("--config.optimizer.b1=0.9" in printed.out) == (module is main)


def test_the_help_of_a_config_lists_what_it_sets_and_its_own_fields(tmp_path, monkeypatch, capsys):
    """Registered tasks and recipes aside: a recipe is one of the package's, with a field that base leaves to it."""
    own = tmp_path / "own.py"
    own.write_text(
        "from configs import base\n\n\ndef get_config(variant=''):\n    config = base.get_config(variant)\n"
        "    config.objective.name, config.steps = 'sapo', 7\n    config.task.options = {'digits': 4, 'test_size': 9}\n"
        "    return config\n"
    )
    monkeypatch.setenv("COLUMNS", "80")

    def said(config):
        with pytest.raises(SystemExit) as stop:
            main.main(["--help", f"--config={config}"])
        assert stop.value.code == 0
        return capsys.readouterr().out.partition("recipes: ")[2].partition("\n\n")[2].partition("exit codes")[0]

    assert said(own).splitlines()[:6] == [
        f"what {own} sets otherwise, and fields of its own:",
        "",
        "  --config.objective.name=sapo  a recipe: see docs/objectives.md",
        "  --config.steps=7  rollouts",
        "  --config.task.options.digits=4",
        "  --config.task.options.test_size=9",
    ]
    assert "variants: this config has grpo, gspo, grpo_smoke and gspo_smoke" in said("demo")
    assert said("base") == "base sets no field otherwise\n\nvariants: this config has 'smoke' or none\n\n"


def test_commands(tmp_path):
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "COLUMNS": "80"}
    program = [sys.executable, "-m", "jaxrl_llm"]
    done = subprocess.run([*program, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in COMMANDS)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert {"train", "evaluate", "sweep", "report"} <= COMMANDS.keys()
    lazy = "import sys, jaxrl_llm.sweep; assert 'jax' not in sys.modules; print(jaxrl_llm.objectives.names()[0])"
    done = subprocess.run([sys.executable, "-c", lazy], env=environment, capture_output=True, text=True)
    assert done.stdout == f"{objectives.names()[0]}\n", done.stderr
    offered = "Engine, Sampling, models, objectives, score, tasks, train"
    with pytest.raises(AttributeError, match=f"has no attribute 'nothing'; it offers {offered}"):
        jaxrl_llm.nothing  # noqa: B018


def test_a_line_of_a_sweep_runs_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("")
    planned = Sweep(
        "?", [{"arm": "A", "seed": 0}, {"arm": "B", "seed": 0, "config": "own.py:x"}], "A", config="grpo:smoke"
    )
    a, b = (shlex.split(command(run, "out")) for run in planned.planned())
    assert a[:5] == [sys.executable, "-m", "jaxrl_llm.main", "--config=grpo:smoke", f"--workdir={tmp_path}/out/A/0"]
    assert b[3] == f"--config={tmp_path}/own.py:x"
