"""Several reward functions with weights: sums, metrics by name, samples, and where a config names them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.ground.metrics import finalize
from jaxrl_llm.records import own_code
from jaxrl_llm.run.settings import config_hash, task_settings, validate
from jaxrl_llm.tasks.verifiers.named_verifiers import UserVerifier
from jaxrl_llm.training.collect import DynamicSampling
from jaxrl_llm.training.reward_sources import RewardConfig, total_rewards
from tests.run.test_settings import changed
from tests.training.test_collect import ALIKE, MIXED, TASK, run, weighting


def test_reward_functions_are_sources_by_their_names():
    """Verified 1, .5 | 0, 0 | 0, 1; 2 and 3 characters less one | four are cut off; weights 1/2 and -2."""
    functions = {"shorter": (lambda prompt, answer, gold, row: len(answer) - 1, False)}
    functions["odd"] = (lambda prompt, answer, gold, row: {"1": 1.0, "11": 0.0}[answer], False)  # others raise
    task = dataclasses.replace(TASK, functions=functions)
    sources = weighting(functions=("own.py:shorter", "pack.own:odd"), function_weights=(0.5, -2.0))
    got, _ = run([("1", "11"), ("000", "0000"), ("0", "1")], rewards=sources, task=task, samples=3)
    shorter, odd, verified = [0, 1, 2, 0, 0, 0], [1, 0, 0, 0, 0, 1], [1, 0.5, 0, 0, 0, 1]
    expected = np.array(verified) + 0.5 * np.array(shorter) - 2 * np.array(odd)
    np.testing.assert_allclose(got.rollout.rewards, expected)
    found = finalize(got.metrics)
    assert found["reward/shorter"] == pytest.approx(3 / 6)
    assert found["reward/shorter_weighted"] == pytest.approx(1.5 / 6)
    assert found["reward/odd_weighted"] == pytest.approx(-4 / 6)
    assert found["reward/total"] == pytest.approx((2.5 + 1.5 - 4) / 6)
    assert got.host["reward/mean"] == pytest.approx(2.5 / 6)  # the task's own
    assert got.host["reward/verifier_errors"] == 2
    assert got.samples == [
        {"prompt": "0=", "answer": "1", "reward": 1.0, "length": 2, "rewards": {"shorter": 0.0, "odd": 1.0}},
        {"prompt": "0=", "answer": "11", "reward": 0.5, "length": 3, "rewards": {"shorter": 1.0, "odd": 0.0}},
        {
            "prompt": "1=",
            "answer": "000",
            "reward": 0.0,
            "length": 4,
            "rewards": {"shorter": 2.0, "odd": 0.0},
            "verifier_error": "odd: KeyError: '000'",
        },
        {
            "prompt": "2=",
            "answer": "0",
            "reward": 0.0,
            "length": 2,
            "rewards": {"shorter": 0.0, "odd": 0.0},
            "verifier_error": "odd: KeyError: '0'",
        },
    ]
    drawn, _ = run([ALIKE, MIXED, ALIKE] * 2, DynamicSampling(2), sources, task=task)
    np.testing.assert_allclose(drawn.rollout.rewards[:4], [-1, 0, -1, 0])  # the mixed groups: 1 - 2, 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"functions": ("exact",), "function_weights": (1.0, 2.0)},
            r"needs one weight for each of the 1 rewards\.func",
        ),
        ({"functions": ("a.py:length",)}, r"reward/length is another metric; rename the function"),
        ({"functions": ("a.py:f_weighted",)}, r"reward/f_weighted is another metric"),
        ({"functions": ("a.py:f", "b:f")}, r"has a name twice; give each function its own name"),
    ],
)
def test_reward_functions_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        weighting(**changes)


def test_reward_functions_have_weight_1():
    assert weighting(functions=("exact", "a.py:f")).weights == {"verifier": 1.0, "exact": 1.0, "f": 1.0}
    assert weighting(functions=("exact",), function_weights=(0.0,)).weights == {"verifier": 1.0}  # only logged


OWN = "tests.tasks.verifiers_for_tests:process"


def test_a_config_names_functions_for_any_task():
    config = changed({"rewards.functions": ("numeric", OWN), "rewards.function_weights": [0.5, 1]})
    settings = validate(config)
    assert settings.rewards.weights == {"verifier": 1.0, "numeric": 0.5, "process": 1.0}
    assert settings.task.name == "sort"
    (numeric, here), (process, apart) = settings.task.functions.values()
    assert (numeric("", "the sum is 1", "1", {}), here, apart) == (1.0, False, True)
    assert process == UserVerifier(OWN)
    assert task_settings(config, tasks.ByteTokenizer()).task.functions.keys() == {"numeric", "process"}
    assert config_hash(config) != config_hash(changed({}))
    noted = own_code.verifier_files(own_code.naming(config.to_dict()))
    assert noted[-1].name == "verifiers_for_tests.py"
    for functions, message in (
        (("numerc",), r"rewards\.functions: verifier='numerc' is unknown \(did you mean 'numeric'"),
        (("no_such.py:f",), r"rewards\.functions: verifier='no_such\.py:f' cannot be imported"),
    ):
        with pytest.raises(ValueError, match=message):
            validate(changed({"rewards.functions": functions}))
    with pytest.raises(ValueError, match=r"rewards\.functions=\('exact',\): sft reads .* set it to \(\)"):
        validate(changed({"rewards.functions": ("exact",), "objective.name": "sft", "rollout.group_size": 1}))


def test_rewards_are_logged_of_the_answers_that_are_trained_on():
    """The third fills a place without a loss."""
    sources, where = {"verifier": jnp.array([1.0, 0.0, 5.0])}, jnp.array([True, True, False])
    total, metrics = total_rewards(RewardConfig(verifier_weight=2.0), sources, where, 3)
    assert total.tolist() == [2, 0, 10]
    assert finalize(metrics) == {"reward/verifier": 0.5, "reward/verifier_weighted": 1.0, "reward/total": 1.0}
