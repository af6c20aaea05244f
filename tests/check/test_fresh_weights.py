"""A checkpoint's tokenizer before fresh weights: when it is warned of, and what a terminal is asked."""

import builtins
import shutil
import sys

import pytest

from configs import stand_ins
from configs.stand_ins.trained_tokenizer import write_tokenizer
from jaxrl_llm import main
from jaxrl_llm.check import fresh_weights
from jaxrl_llm.config import start_up
from jaxrl_llm.run.settings import validate
from tests.reference import tiny_run

SIZES = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}


@pytest.fixture(scope="module")
def checkpoint():
    return stand_ins.checkpoint({"intermediate_size": 16, "num_experts": 0, "qk_norm": "head", **SIZES})


def doubts(folder, **changes):
    settings = validate(tiny_run.make_config(folder, **changes))
    return fresh_weights.doubts(settings)


def test_it_is_said_of_a_checkpoints_tokenizer_alone(tmp_path, checkpoint, monkeypatch):
    said = doubts(tmp_path, **{"task.tokenizer": checkpoint})["fresh_weights"]
    assert f"--config pretrained --config.model.pretrained={checkpoint}" in said
    assert "leave task.tokenizer empty" in said
    assert "fresh weights of 2 layers" in said  # as many as the smoke config has
    assert doubts(tmp_path) == {}
    own = tmp_path / "own"
    write_tokenizer(own, ["1+1=2"], 280)
    assert doubts(tmp_path, **{"task.tokenizer": str(own)}) == {}
    monkeypatch.chdir(tmp_path)
    assert fresh_weights._names_a_checkpoint("Qwen/Qwen3-0.6B")
    shutil.copytree(checkpoint, tmp_path / "here")
    assert fresh_weights._names_a_checkpoint("here")


def test_weights_of_the_checkpoint_are_not_doubted(checkpoint):
    from configs import pretrained

    config = pretrained.get_config("smoke")
    config.model.pretrained = config.task.tokenizer = checkpoint
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        config.model[name] = None
    assert fresh_weights.doubts(validate(config)) == {}


@pytest.fixture
def answered(monkeypatch):
    """Makes this a terminal on which questions get that answer; None: the end of the input."""

    def ask(text):
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)

        def reply(prompt):
            assert prompt == "train fresh weights? [y/N] "
            if text is None:
                raise EOFError
            return text

        monkeypatch.setattr(builtins, "input", reply)

    return ask


@pytest.mark.parametrize("answer", ["", "n", "what?", None])
def test_a_terminal_is_asked_and_no_is_the_default(answered, answer):
    answered(answer)
    fresh_weights.confirm({"learning_rate": "high"})
    with pytest.raises(ValueError, match=r"^not started: the weights would be fresh; "):
        fresh_weights.confirm({"fresh_weights": "none of the checkpoint's"})


def test_yes_goes_on_and_a_log_is_not_asked(answered, monkeypatch):
    monkeypatch.setattr(builtins, "input", None)  # would fail
    fresh_weights.confirm({"fresh_weights": "none of the checkpoint's"})
    answered("y")
    fresh_weights.confirm({"fresh_weights": "none of the checkpoint's"})


def test_the_command_asks_before_anything_is_written(answered, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(start_up, "start_jax", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    answered("n")
    command = ["--config=grpo:smoke", f"--workdir={tmp_path / 'run'}", f"--config.task.tokenizer={checkpoint}"]
    assert main.main(command) == 2
    printed = capsys.readouterr()
    assert "warning fresh_weights: task.tokenizer=" in printed.out
    assert printed.err.startswith("error: not started: the weights would be fresh; ")
    assert not (tmp_path / "run").exists()
