"""Pairs of the start's own answers: each has a right and a wrong one, and DPO reads them."""

import pytest

from experiments.preferences.own_pairs import main
from jaxrl_llm import tasks
from jaxrl_llm.tasks.preference import PairEncoder, read_pairs


@pytest.mark.slow
def test_every_pair_prefers_a_right_answer_to_a_wrong_one(tmp_path):
    fields = {
        "task.options": {"digits": 2, "train_size": 64, "test_size": 8},
        "task.data_dir": tmp_path / "data",
        "warm_start.cache_dir": tmp_path / "cache",
        "warm_start.steps": 60,
        "warm_start.target_pass_rate": 0.0,
        "evaluation.prompts": 8,
    }
    arguments = ["--config", "configs/dpo.py:smoke", "--out", str(tmp_path / "pairs.jsonl"), "--prompts", "64"]
    assert main([*arguments, *(f"--config.{name}={value}" for name, value in fields.items())]) == 0
    task = tasks.make("sort", digits=2)
    read = read_pairs(tmp_path / "pairs.jsonl", PairEncoder.of(task))
    for pair in (*read.train, *read.test):
        gold = "".join(sorted(pair["prompt"].removesuffix("=")))
        assert (pair["chosen"], task.verify(pair["prompt"], pair["rejected"], gold, {})) == (gold, 0.0)
