"""A whole run on a file of questions, through a trained tokenizer, a chat template and a verifier that misbehaves."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from configs.stand_ins.trained_tokenizer import write_tokenizer
from jaxrl_llm import tasks
from jaxrl_llm.check import doubts
from jaxrl_llm.records.run_log import read_rows
from jaxrl_llm.run import assembly
from jaxrl_llm.run.opening import opening
from jaxrl_llm.run.settings import validate
from jaxrl_llm.tasks import verifiers
from tests.reference import tiny_run

QUESTIONS = [{"question": f"{a}+{b}", "gold": str(a + b), "sum": a + b} for a in range(12) for b in range(12)]
VERIFIER = '''
import time

def graded(prompt, answer, gold, row):
    """Closeness of the numbers, from -1 to 2; some answers hang and some raise."""
    assert prompt.count("+") == 1 and gold == str(row["sum"])
    if answer.endswith("3"):
        time.sleep(1000)
    return 2.0 if answer == gold else -min(1.0, abs(int(answer) - row["sum"]) / 10)
'''


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (folder / "mine.py").write_text(VERIFIER)
    write_tokenizer(folder / "tokenizer", [f"{row['question']}={row['gold']}" for row in QUESTIONS], 280)
    config = tiny_run.make_config(
        folder,
        **{
            "task.name": "jsonl",
            "task.tokenizer": str(folder / "tokenizer"),
            "task.chat": True,
            "task.system": "Add.",
            "rollout.prompts": 8,
            "rollout.group_size": 4,
            "updates.minibatches": 1,
            "steps": 1,
            "log.samples": 2,
            "log.diagnostics_every": 0,
            "evaluation.every": 1,
            "evaluation.prompts": 2,
            "evaluation.samples": 1,
            "warm_start.steps": 40,
            "warm_start.batch_size": 16,
        },
    )
    options = {"path": f"{folder}/sums.jsonl", "prompt_field": "question", "answer_field": "gold"}
    with config.unlocked():
        config.task.options = options | {
            "verifier": f"{folder}/mine.py:graded",
            "time_limit": 0.3,
            "prompt_length": 60,
            "answer_length": 4,
        }
    yield config
    verifiers.close()


@pytest.mark.slow
def test_hanging_and_raising_answers_are_counted_zeros_and_the_run_goes_on(config, tmp_path):
    evaluation, _ = tiny_run.train(tmp_path, config)
    assert {"eval/reward", "eval/greedy_reward", "eval/greedy", "eval/pass_at_1"} <= set(evaluation)
    assert -1 <= evaluation["eval/reward"] <= 2
    rows = read_rows(tmp_path / "metrics.jsonl")
    steps = [row for row in rows if "reward/mean" in row]
    assert len(steps) == 1
    failed = [row for row in read_rows(tmp_path / "samples.jsonl") if "verifier_error" in row]
    counted = sum(row["reward/verifier_errors"] + row["reward/verifier_timeouts"] for row in steps)
    assert 0 < len(failed) <= counted
    assert {row["reward"] for row in failed} == {0.0}


def test_exactly_the_sampled_tokens_are_trained(config):
    """Each row is the ids of the templated prompt, then what was sampled; no text is encoded a second time."""
    settings = validate(config)
    run = assembly.build(settings)
    params = run.model.init_sharded(jax.random.key(0))  # untrained: every id is sampled, broken bytes among them
    stream = run.source.stream()
    state = stream.get_state()
    batch = next(stream)
    stream.set_state(state)
    task = settings.task
    source = dataclasses.replace(run.source, samples=99)
    draw = source.judged(source.sample(stream, 1, run.state(params)))
    t = draw.rollout
    arrays = jax.device_get((t.tokens, t.loss_mask, t.segment_ids))
    rewards, truncated = jax.device_get((t.rewards, t.truncated))
    ends = set(task.tokenizer.end_ids)
    assert len(ends) == 2
    for i, (tokens, mask, segments) in enumerate(zip(*arrays, strict=True)):
        asked = task.ids_of_prompt(batch["prompt"][i // settings.rollout.group_size])
        np.testing.assert_array_equal(tokens[: len(asked)], asked)
        np.testing.assert_array_equal(np.flatnonzero(mask), len(asked) + np.arange(mask.sum()))
        np.testing.assert_array_equal(segments != 0, np.arange(len(tokens)) < len(asked) + mask.sum())
        sampled = tokens[mask].tolist()
        assert (sampled[-1] in ends) == (not truncated[i])
        assert not ends & set(sampled[:-1])
        assert draw.samples[i]["answer"] == task.tokenizer.decode(sampled)
        if tasks.UNKNOWN in draw.samples[i]["answer"]:
            assert rewards[i] == 0
    assert any(tasks.UNKNOWN in row["answer"] for row in draw.samples)


def test_a_run_says_and_records_what_its_data_are(config, tmp_path):
    run = assembly.build(validate(config))
    survey = doubts.of_run(run)
    table = survey.table()
    assert f"data       {table[0]}\n           {table[1]}\n" in opening(run, tmp_path, data=table)
    assert sum(split["rows"] for split in survey.splits.values()) == len(QUESTIONS)


def test_the_model_has_the_vocabulary_of_the_tokenizer(config):
    settings = validate(config)
    assert settings.model.vocab_size == settings.task.tokenizer.vocab_size == 3 + 256  # a digit merges with nothing
    assert settings.task.prompting.chat
