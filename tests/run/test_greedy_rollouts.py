"""ReMax: the last answer of each group is the greedy one, judged and not learnt from."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.run import assembly
from jaxrl_llm.run.settings import validate
from jaxrl_llm.training.greedy_rollouts import _without_last
from jaxrl_llm.training.rollouts import questions
from tests.reference import tiny_run


def config_of(folder, **changes):
    return tiny_run.make_config(folder, "reinforce", **{"objective.advantage": "remax"} | changes)


def test_the_last_of_each_group_is_left_out():
    mask = np.asarray([[True, False], [True, True]] * 3)
    np.testing.assert_array_equal(_without_last(mask, 3)[:, 0], [True, True, False, True, True, False])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.lag": 1}, r"rollout.lag=1: objective.advantage=remax draws a greedy answer with each group"),
        ({"rollout.group_size": 1}, "rollout.group_size"),
    ],
)
def test_settings_that_do_not_agree(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        validate(config_of(tmp_path, **changes))


@pytest.mark.slow
def test_the_baseline_is_the_reward_of_the_greedy_answer(tmp_path):
    """Against a greedy rollout of the same weights to the same prompts, and rewards from the text."""
    run: Any = assembly.build(validate(config_of(tmp_path)))
    state = run.start(print)
    draw = run.source.next(run.source.stream(), 1, state)
    ((prompts, _),) = draw.asked
    greedy = dataclasses.replace(run.source.engine, sampling=Sampling(temperature=0.0), group_size=1)
    answers = greedy.generate(state.policy.plain(run.model), *questions(prompts), jax.random.key(0))
    size = draw.group_size
    np.testing.assert_array_equal(draw.rollout.tokens[size - 1 :: size], answers.tokens)
    mask, rewards = np.asarray(draw.rollout.loss_mask), np.asarray(draw.rollout.rewards)
    assert not mask[size - 1 :: size].any()
    assert mask.any(1).sum() == len(mask) - len(mask) // size
    told = np.where(mask, (rewards - np.repeat(rewards[size - 1 :: size], size))[:, None], 0)
    np.testing.assert_allclose(np.asarray(draw.rollout.advantages), told)
    assert np.ptp(told) > 0


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(tmp_path):
    config = config_of(tmp_path, **{"warm_start.steps": 0})
    straight = config, tmp_path / "whole", *tiny_run.train(tmp_path / "whole", config)
    tiny_run.assert_resumes_as(straight, tmp_path / "parts")
