"""The optimal token baseline in the training loop: its squares against plain softmaxes, and a run that learns by it."""

from typing import Any

import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.objectives import further_advantages as further
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import advantage_loops as loops
from tests.reference import tiny_run
from tests.reference import tiny_training as tiny
from tests.training.test_teacher import SHORT, softmaxes


def test_advantages_are_the_loop_over_softmaxes():
    """At temperature 0.9; the sum of squares of every token is that of the whole softmax."""
    model = tiny.make_model()
    params = tiny.draw_params(model)
    objective = objectives.make("reinforce", advantage="optimal_token")
    learner = Learner(model, objective, optax.sgd(1.0), rows="packed", temperature=0.9)
    scorer = Scorer(learner, ReplayConfig(), tiny.GROUP)
    state = make_state(model, params, learner.optimizer)
    rollout: Any = scorer.score(state, None, tiny.draw_trajectory(), [SHORT])
    mask, whole = np.asarray(rollout.loss_mask), softmaxes(model, params)
    squares = (np.exp(whole) ** 2).sum(-1)
    found = further.squared_probabilities(rollout.old_logprobs, rollout.half_logprobs)
    np.testing.assert_allclose(np.asarray(found)[mask], squares[mask], rtol=1e-4)
    rows = [row[m] for row, m in zip(np.asarray(rollout.old_logprobs), mask, strict=True)]
    width = max(map(len, rows))
    logprobs, sums = np.zeros((2, tiny.ROWS, width))
    for i, row in enumerate(rows):
        logprobs[i, : len(row)], sums[i, : len(row)] = row, squares[i][mask[i]]
    expected = loops.optimal_token(np.asarray(rollout.rewards), logprobs, sums, tiny.ANSWERS, tiny.GROUP)
    learnt, _ = scorer.experience(rollout)
    assert learnt.by_token.half_logprobs is None
    for i, m in enumerate(mask):
        np.testing.assert_allclose(np.asarray(learnt.advantages)[i][m], expected[i][: m.sum()], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(tmp_path):
    config = tiny_run.make_config(tmp_path, **{"objective.advantage": "optimal_token", "warm_start.steps": 0})
    straight = config, tmp_path / "whole", *tiny_run.train(tmp_path / "whole", config)
    tiny_run.assert_resumes_as(straight, tmp_path / "parts")
