"""Episodes on vLLM servers: each turn is a question by ids, and the episodes are those of the engine of the run."""

import functools

import jax
import numpy as np
import pytest
from absl import logging

from jaxrl_llm.models import Model
from jaxrl_llm.rollout.remote import RemoteEngine
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.run.assembly import build
from jaxrl_llm.run.settings import validate
from tests.reference.computing_vllm import computing_vllm
from tests.reference.slowly import first_quick
from tests.reference.tiny_rollout import tiny
from tests.reference.tiny_run import assert_parts_are_the_whole, final_state, make_config, metrics, samples, train
from tests.rollout.test_episodes import assert_scored_alike, engine, played, task
from tests.run.test_turns_run import killed

MODEL = Model(tiny())
OWN = task(verify_truncated=True)
LENGTH = OWN.row_length(4)


@pytest.fixture(scope="module")
def greedy():
    """The episodes of greedy answers on the run's own devices."""
    own = engine(MODEL, sampling=Sampling(temperature=0.0))
    params = MODEL.init(jax.random.key(0))
    return params, played(own, own.take_weights(params)[0], OWN, jax.random.key(0))


def served(params, *servers, version=0, **fields):
    fields = {"at_once": 2, "deadline_s": 5.0} | fields
    own = RemoteEngine(MODEL, Sampling(), 2, LENGTH - 4, 4, (1,), servers, **fields)
    held, _ = own.take_weights(params, version)
    return played(own, held, OWN, jax.random.key(0))


def assert_equal(ours, theirs):
    assert ours.episodes == theirs.episodes
    a, b = ours.rollout, theirs.rollout
    for name in ("tokens", "segment_ids", "loss_mask", "truncated"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    np.testing.assert_array_equal(*(np.sort(x.routes.sampled.experts) for x in (a, b)))


def test_episodes_are_those_of_the_engine_and_every_turn_is_asked_by_all_ids_before_it(greedy):
    params, own = greedy
    with computing_vllm(MODEL, LENGTH) as fake:
        played = served(params, fake.address, version=5)
    assert_equal(played, own)
    assert_scored_alike(MODEL, params, played, 1e-5)
    mask = np.asarray(played.rollout.loss_mask)
    np.testing.assert_array_equal(np.asarray(played.rollout.versions), np.where(mask, 5, 0))
    begins = mask & ~np.roll(mask, 1, axis=1)  # an answer; observations stand between two
    asked = [own.episodes[i].context[:start] for i, start in np.argwhere(begins)]
    assert len(asked) == sum(len(one.turns) for one in own.episodes) > len(own.episodes)
    assert sorted(fake.asked) == sorted(asked)


@pytest.mark.parametrize("fault", first_quick(1, ["cut", 500, "restart"]))
def test_a_turn_that_a_server_fails_is_asked_again(greedy, monkeypatch, fault):
    params, own = greedy
    monkeypatch.setattr(logging, "warning", lambda *_: None)
    with computing_vllm(MODEL, LENGTH, faults=[None] * 7 + [fault]) as one, computing_vllm(MODEL, LENGTH) as two:
        played = served(params, one.address, two.address)
        assert one.faults == []
    assert_equal(played, own)


def test_a_server_with_too_little_room_for_an_episode_is_refused(greedy):
    with computing_vllm(MODEL, LENGTH) as fake:
        fake.model["max_model_len"] = LENGTH - 1
        with pytest.raises(ValueError, match=f"start it with --max-model-len {LENGTH}"):
            served(greedy[0], fake.address)


SERVED = {
    "rollout.engine": "vllm",
    "warm_start.steps": 100,
    "task.options": {"numbers": 15, "turns": 4, "train_size": 512, "test_size": 64},
    "rollout.prompts": 8,
    "rollout.group_size": 4,
}
AHEAD = SERVED | {"rollout.lag": 2, "steps": 4, "checkpoint.every": 1, "log.samples": 16, "rollout.prompts": 4}
AHEAD |= {"evaluation.prompts": 4}


def served_run(folder, fields, **fake):
    """The fake servers of a run's model, whose rows are whole episodes."""
    run = build(validate(make_config(folder, "turns", **fields | {"rollout.servers": ("http://none:1",)})))
    return computing_vllm(run.model, run.settings.task.row_length(3), **fake)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_trains_on_served_episodes_and_resumes(tmp_path, lag):
    """R3: every fed token has its experts; what a lag has in flight at a kill is asked again, of the newer policy."""
    fields = SERVED | {"replay.mode": "R3", "rollout.lag": lag}
    with served_run(tmp_path, fields) as fake:
        fields |= {"rollout.servers": (fake.address,)}
        config = functools.partial(make_config, tmp_path, "turns", **fields)
        if lag:
            train(tmp_path / "whole", config(steps=3))
        else:
            assert_parts_are_the_whole(tmp_path, lambda steps: config(steps=steps))
    rows = [row for row in metrics(tmp_path / "whole") if row["step"]]
    for row, most in zip(rows, [0, lag, lag], strict=True):  # newer weights may reach a server before its answers
        assert row.get("rollout/age_max", 0) <= most
        assert row["rollout/turns_mean"] > 1
        assert row["check/unrecorded"] == 0
        assert row["rollout/handshake"] < 1e-5
    assert rows[0]["check/old_sampler_mean"] < 1e-5


def ahead(folder, address):
    return make_config(folder, "turns", **AHEAD | {"rollout.servers": (address,)})


@pytest.mark.slow
def test_a_run_ahead_on_servers_that_is_killed_ends_as_one_without_a_break(tmp_path):
    """Answers follow from their seeds, so that those asked again are the same: the same rows, and nothing twice.

    What is asked again is of a newer policy, so that ages and the sampler's log-probs differ, which GRPO does not read.
    """
    with served_run(tmp_path, AHEAD, drawn=True) as fake:
        config = ahead(tmp_path, fake.address)
        train(tmp_path / "whole", config)
        place = repr(str(tmp_path))
        code = "import tests.rollout.test_served_episodes as s, tests.run.test_turns_run as t; "
        killed(f"{code}t.kills({place} + '/killed', s.ahead({place}, {fake.address!r}), 4, 20)")
        began = [row["step"] for row in metrics(tmp_path / "killed")]
        assert began[-1] in (1, 2, 3)  # the fourth rollout was in flight, asked for by step 2 and wanted by step 4
        train(tmp_path / "killed", config)
    (step, ours), (last, theirs) = (final_state(tmp_path / name, config) for name in ("killed", "whole"))
    assert step == last == 4
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    of_the_policy = ("rollout/age", "rollout/handshake", "kl/sampler", "mismatch/", "check/old_sampler")
    of_the_policy += ("check/sampler_equal", "routing/flips_sampler_old")
    rows = [
        [{name: x for name, x in row.items() if not name.startswith(of_the_policy)} for row in metrics(tmp_path / name)]
        for name in ("killed", "whole")
    ]
    assert [row["step"] for row in rows[0]] == [0, 1, 2, 3, 4]
    assert rows[0] == rows[1]
    said = samples(tmp_path / "killed")
    assert said == samples(tmp_path / "whole")
    assert [row["step"] for row in said if "answer" in row] == [step for step in (1, 2, 3, 4) for _ in range(16)]
    assert any("\n> " in row["answer"] for row in said if "answer" in row)
    assert max(row["rollout/age_max"] for row in metrics(tmp_path / "whole") if row["step"]) <= 2
