"""A teacher behind a server: its log-probs against those on the mesh, faults, refusals by name, and a whole run."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from absl import logging

from jaxrl_llm.models.scoring import score
from jaxrl_llm.run import assembly
from jaxrl_llm.run.opening import opening
from jaxrl_llm.run.served_teacher import ServedTeacher
from jaxrl_llm.run.settings import config_hash, validate
from jaxrl_llm.run.teacher import Teacher
from jaxrl_llm.run.teachers import Teachers
from tests.reference import tiny_reward_model, tiny_run
from tests.reference import tiny_training as tiny
from tests.reference.fake_scorer import FAULTS, scorer
from tests.training.test_teacher import SHORT, learner, softmaxes, teacher_on


def config_of(folder, address, name="distill", **changes):
    return tiny_run.make_config(folder, name, **{"teacher.path": address, "rollout.deadline_s": 0.9} | changes)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A server of the mesh's teacher, with its log-probs from a plain softmax, and the settings of a run with it."""
    teacher, batch = teacher_on(), tiny.draw_batch()
    tokens = np.asarray(batch.tokens)
    plain = np.take_along_axis(softmaxes(teacher.model, teacher.params), tokens[..., None], -1)[..., 0]
    table = {tuple(row[:n].tolist()): x[:n].tolist() for row, x in zip(tokens, plain, strict=True) for n in range(13)}
    with scorer(lambda given: table[tuple(given)]) as server:
        settings = validate(config_of(tmp_path_factory.mktemp("data"), server.address))
        yield SimpleNamespace(server=server, settings=settings, batch=batch)


def scored(taught, *faults):
    taught.server.faults, taught.server.asked = list(faults), []
    found = ServedTeacher(taught.settings, taught.server.address, "teacher")
    own = dataclasses.replace(learner(), divergence=None)
    return np.asarray(found.scored(own, taught.batch, [SHORT]).teacher_logprobs)


def test_its_log_probs_are_those_of_the_teacher_on_the_mesh(taught):
    own = dataclasses.replace(learner(), divergence=None)
    mask = np.asarray(taught.batch.loss_mask)
    there, here = scored(taught), np.asarray(teacher_on().scored(own, taught.batch, [SHORT]).teacher_logprobs)
    np.testing.assert_allclose(there[mask], here[mask], atol=1e-5)
    assert not there[~mask].any()
    assert len(taught.server.asked) == 7  # of 8 answers one is empty
    body = max(taught.server.asked, key=lambda one: len(one["prompt"]))
    assert body == {"model": "teacher", "prompt": body["prompt"], "max_tokens": 1, "prompt_logprobs": 0}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_named_and_its_answer_asked_again(taught, monkeypatch, case):
    fault, message = FAULTS[case]
    honest, warnings = scored(taught), []
    monkeypatch.setattr(logging, "warning", lambda text, *values: warnings.append(text % values))
    np.testing.assert_array_equal(scored(taught, fault), honest)
    named = f"{taught.server.address}.*{message}.*; its answers are asked again"
    assert any(re.match(named, one) for one in warnings), warnings  # a slow machine adds one of the deadline


def test_a_fault_that_stays_ends_the_run_with_one_line(taught):
    with pytest.raises(ValueError, match=r"^teacher.path=http://.*:\d+: 7 answers are left .* holds nan[^\n]*$"):
        scored(taught, *[FAULTS["NaN"][0]] * 99)
    taught.server.faults = []


def test_another_model_at_the_address_ends_the_run(taught, monkeypatch):
    monkeypatch.setattr(taught.server, "name", "other")
    with pytest.raises(ValueError, match="it serves other now, and this run began with teacher; serve that again"):
        scored(taught)


def test_what_is_no_teacher_of_this_policy(taught, monkeypatch):
    s, server = taught.settings, taught.server
    vocabulary = s.task.tokenizer.vocab_size
    monkeypatch.setattr(server, "logprobs", lambda tokens: [-1.0] * len(tokens))
    assert ServedTeacher.find(s).identity == "teacher"

    class Text(type(s.task.tokenizer)):
        backend = None

        def encode(self, text):
            return [len(text)]

    written = dataclasses.replace(s, task=dataclasses.replace(s.task, tokenizer=Text(**vars(s.task.tokenizer))))
    with pytest.raises(ValueError, match=f"teacher.path={server.address} reads text with other ids than the policy's"):
        ServedTeacher.find(written)
    monkeypatch.setattr(server, "encode", lambda text: [len(text)])
    assert ServedTeacher.find(written)
    monkeypatch.setattr(server, "vocabulary", vocabulary - 1)
    with pytest.raises(ValueError, match=f"says 400: .*Token id {vocabulary - 1} is out of vocabulary"):
        ServedTeacher.find(s)
    monkeypatch.setattr(server, "holds", 2)
    with pytest.raises(ValueError, match=r"holds at most 2 tokens, .* takes \d+; start it with --max-model-len \d+"):
        ServedTeacher.find(s)
    with pytest.raises(ValueError, match=r"teacher.path=http://localhost:1: .*does not answer .* docs/distillation.md"):
        ServedTeacher.find(s, path="http://localhost:1")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("distill", {"rollout.temperature": 0.7}, "under the whole vocabulary at temperature 1; set it to 1.0"),
        ("distill", {"rollout.top_k": 5}, "rollout.top_k=5: teacher.path=http://h:1 scores under the whole vocabulary"),
        ("gkd", {}, "teacher.path=http://h:1 scores sampled tokens; set objective.advantage=teacher and"),
        ("distill", {"teacher.path": "runs/a,http://h"}, "teacher.path: 'http://h' is no address; give http://host"),
        ("distill", {"teacher.path": "https://h:1"}, "teacher.path: 'https://h:1' is no address; give http://host"),
    ],
)
def test_settings_that_a_server_does_not_serve(tmp_path, name, changes, message):
    with pytest.raises(ValueError, match=message):
        validate(config_of(tmp_path, "http://h:1", name, **changes))


@pytest.mark.slow
def test_a_run_is_that_of_the_teacher_on_the_mesh(tmp_path):
    """Alone, and as one of two, whose weighted sum is that of one teacher twice."""
    own = {"objective.name": "grpo", "model.hidden_size": 16}
    tiny_reward_model.write(tmp_path / "teacher", tiny_run.make_config(tmp_path), **own)
    here = config_of(tmp_path, str(tmp_path / "teacher"), **{"warm_start.steps": 0, "steps": 3})
    held = Teacher.find(validate(here)).load()
    width = validate(here).task.row_length(validate(here).answer_length)
    run = jax.jit(lambda tokens, ids: score(held.model, held.params, tokens, ids).logprobs)

    def logprobs(given):
        tokens, ids = np.zeros((2, 1, width), np.int32)
        tokens[0, : len(given)], ids[0, : len(given)] = given, 1
        return np.asarray(run(tokens, ids))[0, : len(given)].tolist()

    with scorer(logprobs) as server:
        more = {"warm_start.steps": 0, "steps": 3, "rollout.deadline_s": 60.0}
        addresses = server.address, f"{server.address}/", f"{tmp_path / 'teacher'},{server.address}"
        alone, again, both = (
            tiny_run.make_config(tmp_path, "distill", **more | {"teacher.path": x}) for x in addresses
        )
        assert config_hash(alone) == config_hash(again)
        kinds = {name: assembly.build(validate(config)) for name, config in (("alone", alone), ("both", both))}
        assert isinstance(kinds["alone"].teacher, ServedTeacher)
        assert isinstance(kinds["both"].teacher, Teachers)
        assert "a model on a server" in opening(kinds["alone"], tmp_path)
        for name, config in (("here", here), ("alone", alone), ("both", both)):
            tiny_run.train(tmp_path / name, config)
    rows = {name: tiny_run.metrics(tmp_path / name)[1:] for name in ("here", "alone", "both")}
    for name in ("alone", "both"):
        taught = [[row["kl/teacher"] for row in rows[of]] for of in ("here", name)]
        np.testing.assert_allclose(*taught, rtol=2e-3)
