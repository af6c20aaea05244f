"""Several teachers, and the policy as its own: log-probs by hand, whole runs, and what is refused by name."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.run.blocks import TeacherConfig
from jaxrl_llm.run.self_teacher import SelfTeacher
from jaxrl_llm.run.settings import validate
from jaxrl_llm.run.teacher import Teacher
from jaxrl_llm.run.teachers import Teachers, WeightedDivergence
from jaxrl_llm.training.collect import Draw
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_reward_model, tiny_run
from tests.reference import tiny_training as tiny

LAYOUT = tiny.in_one_shape(tiny.layout_of())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data and warm starts of all runs, and the DIRs of two teachers: a/ and b/."""
    folder = tmp_path_factory.mktemp("shared")
    own = {"objective.name": "grpo", "model.hidden_size": 16}
    for name, step in (("a", 7), ("b", 8)):
        tiny_reward_model.write(folder / name, tiny_run.make_config(folder), step=step, **own)
    return folder


def config_of(folder, name="distill", **changes):
    path = f"{folder / 'a'},{folder / 'b'}"
    return tiny_run.make_config(folder, name, **{"teacher.path": path, "warm_start.steps": 0} | changes)


def draw_of(subjects=("code", "math")):
    prompts: Any = {"prompt": ["p", "q"], "row": [{"subject": name} for name in subjects], "answer": ["12", "3"]}
    asked = np.zeros(tiny.ROWS, np.int32), np.zeros(tiny.ROWS, bool), lambda: ([], {}, [])
    return Draw(tiny.draw_batch(), asked=[(prompts, asked)])


def learner():
    return Learner(tiny.make_model(), objectives.make("dapo"), optax.sgd(1.0), rows="packed", temperature=0.9)


def scored(config, draw=None):
    parts = tuple(Teacher("", "", tiny.make_model(), tiny.draw_params(tiny.make_model(), seed=k)) for k in (5, 6))
    given = learner(), tiny.draw_batch(), [LAYOUT], draw or draw_of(), None
    found = Teachers(config, [], parts).scored(*given).teacher_logprobs
    return np.asarray(found), [np.asarray(one.scored(*given).teacher_logprobs) for one in parts]


def test_weights_are_of_log_probs():
    found, (a, b) = scored(TeacherConfig(path="A,B", weights=(3.0, 1.0)))
    np.testing.assert_allclose(found, 0.75 * a + 0.25 * b, rtol=1e-6)
    assert np.abs(a - b).max() > 0.5


def test_the_row_of_a_prompt_names_its_teacher():
    config = TeacherConfig(path="A,B", by="subject=math,code")
    found, (a, b) = scored(config)
    np.testing.assert_array_equal(found, np.where(np.arange(tiny.ROWS)[:, None] < tiny.GROUP, b, a))
    with pytest.raises(ValueError, match=r"a prompt's row has subject=law; give every value of the data a teacher"):
        scored(config, draw_of(("math", "law")))


def test_divergences_are_summed_by_their_weights():
    parts = tuple(lambda frozen, x, k=k, **how: k * x + frozen + how["rows"] for k in (1.0, 2.0))
    assert WeightedDivergence(parts, (0.25, 0.75))((10.0, 20.0), 4.0, rows=1.0) == 0.25 * 15 + 0.75 * 29


def test_the_policy_reads_the_hint_before_its_own_prompt(folder):
    """Against one forward over rows that were written by hand: hint, prompt, answer."""
    rollout, model = tiny.draw_batch(), tiny.make_model()
    params = tiny.draw_params(model)
    settings = validate(config_of(folder, **{"teacher.path": "self", "teacher.hint": "={answer}"}))
    settings = dataclasses.replace(settings, updates=dataclasses.replace(tiny.UPDATES, layout="padded"))
    given = learner(), rollout, [LAYOUT], draw_of(), Policy(params)
    found = np.asarray(SelfTeacher(settings).scored(*given).teacher_logprobs)
    hints = [settings.task.tokenizer.encode(hint) for hint in ["=12"] * tiny.GROUP + ["=3"] * tiny.GROUP]
    tokens, mask = np.asarray(rollout.tokens), np.asarray(rollout.loss_mask)
    whole = np.zeros((tiny.ROWS, tiny.TIME + 3), np.int32)
    for i, hint in enumerate(hints):
        row = [*hint, *tokens[i, : tiny.LENGTHS[i]]]
        whole[i, : len(row)] = row
    hidden = jax.jit(model.apply)(params, whole, segment_ids=(whole > 0).astype(np.int32)).hidden
    logits = np.asarray(jax.jit(model.logits)(params, hidden), np.float64) / 0.9
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for i, t in zip(*np.nonzero(mask), strict=True):
        assert found[i, t] == pytest.approx(logprobs[i, len(hints[i]) + t - 1, tokens[i, t]], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("distill", {"teacher.weights": (1.0,)}, r"teacher.weights=\(1.0,\) must be 2 weights of at least 0"),
        ("distill", {"teacher.by": "subject=math"}, r"must be FIELD=VALUE,VALUE with a value for each of 2 teachers"),
        ("gkd", {"teacher.by": "s=a,b"}, "teacher.by scores sampled tokens; set objective.advantage=teacher"),
        ("gkd", {"teacher.path": "self"}, "teacher.path=self scores sampled tokens; set objective.advantage=teacher"),
        ("distill", {"teacher.path": "self", "rollout.lag": 1}, r"rollout.lag=1: teacher.path=self scores under"),
        ("distill", {"teacher.by": "s=a,b", "dynamic_sampling.max_draws": 2}, "reads the prompts of one draw"),
    ],
)
def test_settings_that_do_not_agree(folder, name, changes, message):
    with pytest.raises(ValueError, match=message):
        validate(config_of(folder, name, **changes))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), [("distill", {"teacher.weights": (2.0, 1.0)}), ("gkd", {})])
def test_a_run_with_two_teachers_resumes_bit_for_bit(folder, tmp_path, name, changes):
    config = config_of(folder, name, **changes)
    straight = config, tmp_path / "whole", *tiny_run.train(tmp_path / "whole", config)
    tiny_run.assert_resumes_as(straight, tmp_path / "parts")
    rows = tiny_run.metrics(tmp_path / "whole")[1:]
    learnt = "kl/teacher" if name == "distill" else "loss/teacher"
    assert rows[-1][learnt] < rows[0][learnt]


@pytest.mark.slow
def test_a_run_that_teaches_itself(folder, tmp_path):
    """A sorted answer before the prompt; the hint is written in the task's own characters."""
    config = config_of(folder, **{"teacher.path": "self", "teacher.hint": "{answer}=", "warm_start.steps": 50})
    straight = config, tmp_path / "whole", *tiny_run.train(tmp_path / "whole", config)
    tiny_run.assert_resumes_as(straight, tmp_path / "parts")
    rows = tiny_run.metrics(tmp_path / "whole")[1:]
    assert all(np.isfinite(row["kl/teacher"]) and row["kl/teacher"] > 0 for row in rows)
