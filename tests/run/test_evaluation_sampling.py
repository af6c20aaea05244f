"""An evaluation at its own temperature and cuts: who samples so, what says so, and what stays as it was."""

import json

import pytest

from jaxrl_llm import evaluation
from jaxrl_llm.config import start_up
from jaxrl_llm.rollout.pass_rate import Evaluator
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.run import assembly
from jaxrl_llm.run.opening import opening
from jaxrl_llm.run.settings import config_hash, validate
from tests.reference import tiny_run
from tests.reference.slowly import first_quick

PUBLISHED = {"evaluation.temperature": 0.6, "evaluation.top_p": 0.95}
ROW = {"prompt": "1=", "greedy": "1", "reward": 1.0, "sampled": ["1"] * 2, "sampled_reward": [1.0, 0.0]}


def evaluator_of(folder, **changes):
    return assembly.build(validate(tiny_run.make_config(folder, **{"warm_start.steps": 0} | changes))).evaluator


@pytest.mark.parametrize(
    "engine",
    first_quick(1, [{}, {"rollout.engine": "vllm", "rollout.servers": ("http://127.0.0.1:9",)}]),
    ids=["jax", "server"],
)
def test_a_run_evaluates_as_its_block_says(tmp_path, engine):
    """Whatever rollouts use and whoever samples them; by default at temperature 1 without cuts, as ever."""
    hot = {"rollout.temperature": 1.3} | engine
    assert evaluator_of(tmp_path, **hot).sampling == Sampling(1.0, greedy_last=True)
    assert evaluator_of(tmp_path, **hot, **PUBLISHED).sampling == Sampling(0.6, 0, 0.95, 0.0, greedy_last=True)


def test_the_start_of_a_run_says_it(tmp_path):
    lines = opening(assembly.build(validate(tiny_run.make_config(tmp_path, **PUBLISHED))), "runs/x").splitlines()
    assert "evaluation 16 prompts, each a greedy answer and 2 at temperature 0.6, top_p 0.95" in lines


def test_it_may_change_on_resume_but_for_a_start_that_it_decides(tmp_path):
    def identity(**changes):
        return config_hash(tiny_run.make_config(tmp_path, **changes))

    assert identity(**PUBLISHED) == identity()
    target = {"warm_start.target_pass_rate": 0.5}
    assert identity(**target, **PUBLISHED) != identity(**target)


def test_zero_is_the_greedy_answer_that_is_there_already(tmp_path):
    with pytest.raises(
        ValueError, match=r"evaluation\.temperature=0 makes all .* and eval/greedy is of the greedy one already"
    ):
        validate(tiny_run.make_config(tmp_path, **{"evaluation.temperature": 0.0}))


@pytest.fixture
def evaluated(tmp_path, monkeypatch, capsys):
    """evaluated(*flags) -> (the sampling, table, last row of evaluation.jsonl): of a DIR that samples as published."""
    monkeypatch.setattr(start_up, "start_jax", lambda: None)
    tiny_run.untrained(tmp_path / "run", tiny_run.make_config(tmp_path, **{"warm_start.steps": 0}, **PUBLISHED))
    seen = []
    monkeypatch.setattr(Evaluator, "__call__", lambda self, params: seen.append(self.sampling) or ({}, [ROW] * 2))

    def call(*flags):
        assert evaluation.main([f"--workdir={tmp_path / 'run'}", "--samples=2", "--k=1", *flags]) == 0
        row = json.loads((tmp_path / "run" / "evaluation.jsonl").read_text().splitlines()[-1])
        return seen[-1], capsys.readouterr().out, row

    return call


def test_evaluate_samples_as_the_dir_or_as_it_is_told(evaluated):
    sampling, table, row = evaluated()
    assert sampling == Sampling(0.6, 0, 0.95, 0.0, greedy_last=True)
    assert "\nsampled: at temperature 0.6, top_p 0.95\n" in table
    assert [row[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [0.6, 0, 0.95, 0.0]
    sampling, table, row = evaluated("--temperature=0.8", "--top-k=20", "--top-p=1", "--min-p=0.1")
    assert sampling == Sampling(0.8, 20, 1.0, 0.1, greedy_last=True)
    assert "\nsampled: at temperature 0.8, top_k 20, min_p 0.1\n" in table
    assert [row[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [0.8, 20, 1.0, 0.1]


@pytest.mark.slow
def test_evaluate_on_another_task_samples_as_its_config(evaluated):
    sampling, *_ = evaluated("--config=grpo:smoke", "--config.evaluation.top_k=7")
    assert sampling == Sampling(1.0, 7, greedy_last=True)
