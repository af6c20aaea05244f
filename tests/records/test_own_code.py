"""What the opening of a DIR may run: nothing that came with it, and what its user trained with as long as it is that.

Every piece of code here leaves a file when it runs.
"""

import json
import sys
from pathlib import Path

import pytest

from configs import grpo
from jaxrl_llm import evaluation, export, generate, main, tasks
from jaxrl_llm.config import loading, start_up
from jaxrl_llm.records import own_code
from jaxrl_llm.records.recorded import FORMAT
from jaxrl_llm.records.recorded_config import recorded_config
from jaxrl_llm.run.reward_model import RewardModel
from jaxrl_llm.run.run_dir import check
from jaxrl_llm.run.settings import config_hash, validate
from jaxrl_llm.tasks.verifiers import user_verifier

COMMANDS = {
    evaluation: ["--prompts=1"],
    generate: ["--prompt=1="],
    export: ["--to=exported"],
}
CODE = """
from pathlib import Path
from configs import grpo

Path({mark!r}).touch()

def get_config(variant=""):
    return grpo.get_config("smoke")

def verify(prompt, answer, gold, row):
    return 1.0
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to be in, with a cache folder of the user's own and a DIR."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as under `python -m`
    monkeypatch.delitem(sys.modules, "x", raising=False)
    user_verifier._function.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(start_up, "start_jax", lambda: None)
    (tmp_path / "DIR").mkdir()
    (tmp_path / "questions.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    return tmp_path


def code(path: Path) -> Path:
    """A file that leaves `ran` when it runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(CODE.format(mark=str(Path("ran").absolute())))
    return path


def record(source="", verifier="exact", digests=None, task="jsonl"):
    """Write config.json of the DIR."""
    config = grpo.get_config("smoke")
    config.task.name = task
    config.task.options = {"path": "questions.jsonl", "verifier": verifier}
    written = {"format": FORMAT, "config": config.to_dict(), "config_hash": "x", "code": digests}
    written |= {"source": {"file": str(source), "variant": "", "recipe": ""}} if source else {}
    Path("DIR/config.json").write_text(json.dumps(written))
    return config


def forged(path: Path) -> dict[str, str]:
    """The digests that whoever writes config.json can write there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", "elsewhere")
        return own_code.noted(str(path), {})


def attack(name):
    """The two ways to name code, for a file of the DIR, and for one that was shipped beside it."""
    way, place = name.split(" ")
    path = code({"inside": Path("DIR/x.py"), "beside": Path("x.py"), "linked": Path("DIR/x.py")}[place])
    if place == "linked":
        Path("x.py").symlink_to(path)
        path = Path("x.py")
    digests = forged(path.absolute()) | forged(path.resolve())
    if way == "source":
        record(path.absolute(), digests=digests, task="unheard_of")
    else:
        record(verifier="x:verify" if way == "module" else f"{path}:verify", digests=digests)


ATTACKS = ["source inside", "source beside", "source linked", "file inside", "file beside", "file linked"]


@pytest.mark.parametrize("name", [*ATTACKS, "module beside"])
def test_no_command_runs_what_came_with_a_dir(here, capsys, name):
    attack(name)
    for command, arguments in COMMANDS.items():
        assert command.main(["--workdir=DIR", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "x.py is code that DIR/config.json names, and it does not run: " in error
        assert "give --trust-code" in error
    with pytest.raises(ValueError, match="trust it, train the reward model with it yourself"):
        RewardModel.find("DIR", tasks.ByteTokenizer())
    assert not Path("ran").exists()


@pytest.mark.parametrize("name", [*ATTACKS, "module beside"])
def test_with_trust_it_runs(here, name):
    attack(name)
    config = recorded_config("DIR", trust=True)
    if not name.startswith("source"):
        validate(config)
    assert Path("ran").exists()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["source inside", "file beside"])
def test_every_command_may_be_told_to_trust(here, command, name):
    attack(name)
    Path("DIR/checkpoints/1").mkdir(parents=True)
    assert command.main(["--workdir=DIR", *COMMANDS[command], "--trust-code"]) == 2  # nothing is in its checkpoint
    assert Path("ran").exists()


def test_a_checkpoint_has_no_code_to_trust(here, capsys):
    assert generate.main(["--checkpoint=x", "--prompt=1", "--trust-code"]) == 2
    assert "--trust-code belongs to a DIR" in capsys.readouterr().err


def test_training_runs_no_code_of_the_dir_that_it_refuses(here, capsys):
    attack("file inside")
    Path("DIR/checkpoints/1").mkdir(parents=True)
    assert main.main(["--config=grpo:smoke", "--workdir=DIR"]) == 2
    assert "holds a run of another config" in capsys.readouterr().err
    with pytest.raises(ValueError, match="holds a run of another config"):
        check("DIR", loading.load(loading.find("grpo:smoke")))
    assert not Path("ran").exists()


@pytest.mark.parametrize("way", ["source", "file", "module"])
def test_what_the_user_trained_with_runs_until_it_changes(here, way):
    own = code(here / "mine.py")
    task = "unheard_of" if way == "source" else "jsonl"
    verifier = {"source": "exact", "file": "mine.py:verify", "module": "mine:verify"}[way]
    config = record(own, verifier, task=task)
    before = "config.json has no digest of it"
    with pytest.raises(ValueError, match=rf"mine\.py is code .* does not run: {before}; read it, .* --trust-code"):
        recorded_config("DIR")
    source = own if way == "source" else loading.CONFIGS / "grpo.py"
    digests = own_code.noted(str(source), config.task.options.to_dict())
    assert str(own) in digests
    record(own, verifier, digests, task)
    recorded_config("DIR")
    assert Path("ran").exists() == (way == "source")
    own.write_text(own.read_text() + "\n")
    with pytest.raises(ValueError, match="it has changed since the run recorded it"):
        recorded_config("DIR")
    digests = forged(own) if way == "source" else digests | forged(own)
    record(own, verifier, digests, task)
    with pytest.raises(ValueError, match="you have not trained with it on this machine"):
        recorded_config("DIR")


@pytest.mark.parametrize("place", ["inside", "linked"])
def test_code_inside_the_dir_does_not_run_although_its_user_trained_with_it(here, place):
    attack(f"file {place}")
    own_code.noted(str(Path("DIR/x.py")), {})
    with pytest.raises(ValueError, match=r"DIR/x\.py is code .* does not run: it lies inside the DIR"):
        recorded_config("DIR")


def test_digests_leave_the_hash_of_a_config_alone(here):
    config = record()
    assert config_hash(config) == config_hash(recorded_config("DIR"))


def test_a_verifier_is_found_wherever_an_option_names_it(here):
    """And only what `verifier` would import."""
    package = here / "pack"
    for name in ("__init__.py", "judge.py"):
        code(package / name)
    options = {"judges": [{"of": "pack.judge:verify"}], "path": "a:b c", "none": "no_such_module:f", "address": "a://b"}
    assert own_code.verifier_files(options) == [package / "__init__.py", package / "judge.py"]
    assert not Path("ran").exists()
    with pytest.raises(ValueError, match="names no function"):
        tasks.verifiers.verifier("pack.judge:not a name")
    assert not Path("ran").exists()
