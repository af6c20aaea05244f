"""A real vLLM server on CPU, which `make vllm` installs: handshake, training with R3, new weights, experts, a kill.

JAXRL_VLLM names the environment, by default .venv-vllm; without it the tests are skipped.
"""

import os
import re
import signal
import string
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl_llm.config import loading
from jaxrl_llm.models.scoring import score
from jaxrl_llm.run import trainer
from jaxrl_llm.run.assembly import build
from jaxrl_llm.run.settings import validate
from tests.reference import several, tiny_run

ENVIRONMENT = Path(os.environ.get("JAXRL_VLLM", Path(__file__).parents[2] / ".venv-vllm"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ENVIRONMENT.is_dir(), reason="no vLLM; `make vllm` installs it, JAXRL_VLLM says where"),
]


@pytest.fixture(scope="module")
def trained():
    """Two steps of training on a server that the run starts, and the engine with its weights after them."""
    fields = [("rollout.launch", str(ENVIRONMENT)), ("rollout.temperature", "0.7"), ("replay.mode", "R3")]
    run = build(validate(loading.load(loading.find("sort_vllm:smoke"), fields)))
    state, stream, rows = run.start(lambda text: None), run.source.stream(), []
    for step in (1, 2):
        state, current = trainer.take_step(run, state, stream, step)
        current.check()
        rows.append(current.row())
    engine = run.source.engine
    held, _ = engine.take_weights(state.policy.plain(run.model), 2)
    batch = next(stream)
    asked = held, batch["tokens"], batch["lengths"], batch["draw"].astype(np.uint32), jax.random.key(5)
    yield SimpleNamespace(run=run, state=state, rows=rows, engine=engine, asked=asked, t=engine.generate(*asked))
    engine.close()


def test_training_agrees_with_the_server(trained):
    for row in trained.rows:
        assert row["rollout/handshake"] < 1e-5
        assert row["check/old_sampler_mean"] < 1e-5
        assert row["check/unrecorded"] == 0
        assert row["routing/flips_sampler_old"] < 0.01
        assert row["rollout/parameters_moved_bytes"] > 1e5
    assert trained.rows[1]["time/parameters_moved_s"] < trained.rows[0]["time/parameters_moved_s"]


def test_tokens_say_who_sampled_them(trained):
    t = trained.t
    np.testing.assert_array_equal(np.asarray(t.versions)[np.asarray(t.loss_mask)], 2)


def test_experts_are_ours_where_the_choice_is_clear(trained):
    t, model = trained.t, trained.run.model
    own = score(model, trained.state.policy.plain(model), t.tokens, t.segment_ids, temperature=0.7, router_logits=True)
    np.testing.assert_allclose(np.where(t.loss_mask, own.logprobs, 0), t.sampler_logprobs, atol=1e-4)
    fed = np.arange(t.tokens.shape[1])[None] < np.asarray(t.segment_ids).sum(1, keepdims=True) - 1
    ordered = np.sort(np.asarray(own.routing.logits), -1)
    clear = (ordered[..., -2] - ordered[..., -3] > 1e-4) & fed[None]
    assert clear.sum() > 0.9 * fed.sum() * len(clear)
    theirs, ours = np.sort(np.asarray(t.routes.sampled.experts), -1), np.sort(np.asarray(own.routing.experts), -1)
    np.testing.assert_array_equal(theirs[clear], ours[clear])


def test_pauses_in_the_middle_of_answers_change_nothing(trained):
    """A pause preempts what runs, and the tokens are fed again: their experts must not be recorded twice."""
    (server,), done = trained.engine._servers, threading.Event()

    def pause():
        while not done.wait(0.02):
            server._call("POST", "/pause?mode=keep", {}, 60.0)
            server._call("POST", "/resume", {}, 60.0)

    pausing = threading.Thread(target=pause)
    pausing.start()
    try:
        again = trained.engine.generate(*trained.asked)
    finally:
        done.set()
        pausing.join()
    np.testing.assert_array_equal(again.tokens, trained.t.tokens)
    np.testing.assert_array_equal(again.routes.sampled.experts, trained.t.routes.sampled.experts)


def test_a_killed_server_is_started_again_and_nothing_is_lost(trained):
    (process,) = trained.engine._serving._running.values()
    threading.Timer(0.2, os.killpg, (process.pid, signal.SIGKILL)).start()
    again = trained.engine.generate(*trained.asked)
    if process.poll() is None:  # all was answered before
        process.wait(10)
        again = trained.engine.generate(*trained.asked)
    np.testing.assert_array_equal(again.tokens, trained.t.tokens)
    np.testing.assert_allclose(again.sampler_logprobs, trained.t.sampler_logprobs, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(again.versions), np.asarray(trained.t.versions))


def test_episodes_read_a_servers_cached_prefixes_and_none_of_earlier_weights(tmp_path):
    """A dense model, whose weights move far in a step: with a cache that is kept, log-probs are off by 0.1."""
    fields = {
        "rollout.engine": "vllm",
        "rollout.launch": str(ENVIRONMENT),
        "rollout.prompts": 8,
        "rollout.group_size": 4,
        "model.num_experts": 0,
        "model.head_dim": 32,
        "task.template": string.ascii_lowercase * 3 + "{prompt}",
        "task.options": {"numbers": 15, "turns": 4, "train_size": 512, "test_size": 64},
        "warm_start.steps": 100,
        "warm_start.learning_rate": 1e-2,
        "optimizer.learning_rate": 1e-2,
    }
    run = build(validate(tiny_run.make_config(tmp_path, "turns", **fields)))
    engine, stream = run.source.engine, run.source.stream()
    engine._serving._options += ["--enable-prefix-caching", "--block-size", "32"]
    state = run.start(lambda text: None)
    try:
        for step in (1, 2):
            state, current = trainer.take_step(run, state, stream, step)
            current.check()
            row = current.row()
            assert row["rollout/turns_mean"] > 1 or step == 2
            assert row["rollout/handshake"] < 1e-5
            assert row["check/old_sampler_mean"] < 1e-5
        said = engine._servers[0]._call("GET", "/metrics").decode()
    finally:
        engine.close()
    asked, found = (
        float(re.findall(rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)", said, re.MULTILINE)[0])
        for name in ("queries", "hits")
    )
    assert found > 0.5 * asked > 0  # two blocks of 32 of the 87 tokens of a prompt


def test_two_processes_train_on_one_server(tmp_path):
    """Weights go over HTTP, with a lag, so that answers are waited for beside collectives; every step is there once."""
    fields = {
        "steps": 3,
        "mesh.shape": "(1,-1,1,1)",
        "rollout.launch": ENVIRONMENT.absolute(),
        "rollout.weights_by": "http",
        "rollout.lag": 1,
        "rollout.temperature": 0.7,
        "replay.mode": "R3",
        "task.data_dir": tmp_path / "data",
        "warm_start.cache_dir": tmp_path / "cache",
    }
    given = [f"--config.{name}={value}" for name, value in fields.items()]
    command = ["-m", "jaxrl_llm.main", "--config=sort_vllm:smoke", f"--workdir={tmp_path / 'run'}", *given]
    several.ended(tmp_path / "job", 2, command, timeout=900)
    rows = [row for row in tiny_run.metrics(tmp_path / "run") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 < row["rollout/handshake"] < 1e-5
        assert row["check/unrecorded"] == 0
        assert row["rollout/age_max"] <= 1
    assert rows[0]["check/old_sampler_mean"] < 1e-5
