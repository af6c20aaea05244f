"""`jaxrl_llm.train`: the command's run from Python, by name or from a ConfigDict."""

import json

import pytest

import jaxrl_llm
from jaxrl_llm.config import start_up
from jaxrl_llm.run import assembly, reopened, trainer
from tests.reference import tiny_run


@pytest.fixture(autouse=True)
def _of_this_process(monkeypatch, tmp_path):
    monkeypatch.setattr(start_up, "start_jax", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_names_of_the_package():
    from jaxrl_llm.models import scoring
    from jaxrl_llm.rollout import engine, sampling

    assert (jaxrl_llm.Engine, jaxrl_llm.Sampling) == (engine.Engine, sampling.Sampling)
    assert jaxrl_llm.score is scoring.score
    assert {"Engine", "Sampling", "score", "train", "objectives"} <= set(dir(jaxrl_llm))
    with pytest.raises(AttributeError, match=r"no attribute 'trian'; it offers Engine, Sampling, models, objectives"):
        _ = jaxrl_llm.trian


@pytest.mark.slow
def test_a_name_with_fields_and_a_config_dict_are_one_run(tmp_path, monkeypatch):
    """What is trained is that of the command: `trainer.train` is given the same settings and the same identity."""
    seen = []

    def trained(run, log, identity):
        seen.append((run.settings.steps, run.settings.seed, identity))
        return {"eval/greedy": 0.5}

    monkeypatch.setattr(trainer, "train", trained)
    fields = {"seed": 3, "steps": 2, "mesh.shape": (1, 1, 1, 1), "task.options": {"digits": 4, "train_size": 64}}
    assert jaxrl_llm.train("grpo:smoke", tmp_path / "name", fields) == {"eval/greedy": 0.5}
    from configs import grpo

    config = grpo.get_config("smoke")
    before = config.to_json()
    assert jaxrl_llm.train(config, str(tmp_path / "dict"), fields) == {"eval/greedy": 0.5}
    assert config.to_json() == before
    assert seen[0] == seen[1]
    assert seen[0][:2] == (2, 3)
    named, made = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("name", "dict"))
    assert named["config"] == made["config"]
    assert named["source"]["variant"] == "smoke"
    assert "source" not in made
    assert json.loads((tmp_path / "dict" / "result.json").read_text()) == {"eval/greedy": 0.5}


def test_what_the_command_says_in_a_line_is_raised(tmp_path):
    with pytest.raises(FileNotFoundError, match="--config=grop is neither a file nor"):
        jaxrl_llm.train("grop", tmp_path / "run")
    with pytest.raises(ValueError, match=r"optimizer.learning_rate=-1"):
        jaxrl_llm.train("grpo:smoke", tmp_path / "run", {"optimizer.learning_rate": -1.0})
    assert not (tmp_path / "run").exists()


@pytest.mark.slow  # a whole run; test_python_page.py trains one by name
def test_a_finished_run_gives_its_result_again_and_opens_without_a_file(tmp_path, monkeypatch):
    config = tiny_run.make_config(tmp_path, "grpo", **{"steps": 1, "warm_start.steps": 1})
    reached = jaxrl_llm.train(config, tmp_path / "run")
    assert 0 <= reached["eval/greedy"] <= 1
    assert reopened.restored(tmp_path / "run")[1] == 1
    monkeypatch.setattr(assembly, "build", None)  # nothing is built again
    assert jaxrl_llm.train(config, tmp_path / "run") == reached
