"""Whole runs: they learn, resume bit for bit, stop on request, refuse what is not theirs, and compile once a phase."""

import dataclasses
import io
import logging
import os
import re
import shutil
import signal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.check import doubts
from jaxrl_llm.ground.signals import Stopped
from jaxrl_llm.models.gate import Gate
from jaxrl_llm.records.checkpointing import Checkpoints, steps_of
from jaxrl_llm.records.progress import PROGRAMS
from jaxrl_llm.records.run_log import RunLog
from jaxrl_llm.rollout import pass_rate
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.run import assembly, saves, trainer
from jaxrl_llm.run.settings import validate
from jaxrl_llm.training import collect
from jaxrl_llm.training.state import TrainState
from tests.reference import tiny_run
from tests.reference.metrics_doc import documented
from tests.reference.waiting import until

STEPS = 4
# Checkpoints after steps 2 and 4, evaluation after 4, heavy diagnostics after 2 and 4.
CADENCE = {"steps": STEPS, "checkpoint.every": 2, "evaluation.every": STEPS, "log.diagnostics_every": 2}


class Compilations(logging.Handler):
    """Counts what XLA compiles, by the name of the function."""

    def __init__(self):
        super().__init__()
        self.names = []

    def emit(self, record):
        text = record.getMessage()
        if text.startswith("Finished XLA compilation of jit("):
            self.names.append(text.split("jit(")[1].split(")")[0])

    def count(self, name):
        return self.names.count(name)


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
    """A run from the first step to the last: (config, DIR, last evaluation, what was compiled for it)."""
    workdir, config = tmp_path_factory.mktemp("straight"), tiny_run.make_config(folder, **CADENCE)
    compiled, logger = Compilations(), logging.getLogger("jax._src.dispatch")
    logger.addHandler(compiled)
    logger.propagate = False
    jax.clear_caches()  # of programs that another file compiled
    with jax.log_compiles():
        found, said = tiny_run.train(workdir, config)
    logger.removeHandler(compiled)
    logger.propagate = True
    assert f"step {STEPS}/{STEPS}" in said
    return config, workdir, found, compiled


def assert_same_run(workdir, straight, extra=()):
    """Final state and every row, but for the clock; `extra` metrics may have been measured besides."""
    config, expected, *_ = straight
    (step, state), (last, wanted) = tiny_run.final_state(workdir, config), tiny_run.final_state(expected, config)
    assert step == last == STEPS
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    rows = tiny_run.metrics(workdir)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row, other in zip(rows, tiny_run.metrics(expected), strict=True):
        assert {name: value for name, value in row.items() if not name.startswith(extra)} | {
            name: value for name, value in other.items() if name.startswith(extra)
        } == other


def test_every_logged_key_is_documented(straight):
    rows = tiny_run.read_rows(straight[1] / "metrics.jsonl")
    assert {key for row in rows for key in row} - {"step"} <= documented(), "add them to docs/metrics.md"


@pytest.mark.parametrize(("bound", "epochs"), [pytest.param(1e9, 1, marks=pytest.mark.slow), (1e-9, 2)])
def test_a_rollout_stops_its_updates_at_a_bound_on_the_drift(straight, tmp_path, bound, epochs):
    """Out of reach it changes nothing. The second update is the first with a drift; it is taken, and a second epoch is
    not: either way the rollout is the one of two updates."""
    config = straight[0].copy_and_resolve_references()
    config.updates.stop_at_kl, config.updates.epochs, config.steps = bound, epochs, 1
    tiny_run.train(tmp_path, config)
    row, whole = tiny_run.metrics(tmp_path)[1], tiny_run.metrics(straight[1])[1]
    assert row.pop("update/taken") == int(tiny_run.final_state(tmp_path, config)[1].updates) == 2
    shared = {name: value for name, value in row.items() if not name.startswith("eval/")}
    assert shared == {name: whole[name] for name in shared}


def test_each_phase_compiles_once(straight):
    """Training and evaluation have a rollout program each; scoring has one, and one with replay."""
    compiled = straight[3]
    others = {"init_fn", "_prepare"}  # of fresh parameters, and of rollouts on a mesh of their own
    assert set(PROGRAMS) - others <= set(compiled.names)  # a function that was renamed would go unnamed
    assert "_prepare" not in compiled.names
    assert compiled.count("_update") == 2  # of the warm start and of the run
    assert compiled.count("_score") == 2
    assert compiled.count("_generate") == 2


def test_the_logs_are_whole(straight):
    config, workdir, found, _ = straight
    rows = tiny_run.metrics(workdir)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert found.items() <= rows[-1].items()
    assert {"eval/greedy", "eval/pass_at_1", "eval/pass_at_k"} <= rows[0].keys()
    assert "reward/mean" not in rows[0]
    for row in rows[1:]:
        assert row["check/current_old_mean"] < 1e-4
        assert row["check/old_sampler_mean"] < 1e-4
        assert row["routing/flips_sampler_old"] < 0.01
        assert row["update/skipped"] == row["update/not_finite"] == 0
        assert len(row["routing/flips_old_current_by_update"]) == config.updates.minibatches
    assert [row["step"] for row in rows if "routing/share_of_variance" in row] == [2, 4]
    written = tiny_run.samples(workdir)
    assert {row["step"] for row in written if row.get("split") != "test"} == {1, 2, 3, 4}
    assert {row["step"] for row in written if row.get("split") == "test"} == {0, 4}


class Killed(Exception):
    pass


def test_a_killed_run_resumes_as_if_nothing_had_been(straight, tmp_path, monkeypatch):
    """It dies after step 4 was trained and row 3 was written; the last checkpoint is of step 2."""
    evaluate = trainer.evaluate

    def dies(run, state):
        if state.updates == STEPS * straight[0].updates.minibatches:
            until((tmp_path / "checkpoints" / "2").exists)  # it is written beside the steps
            raise Killed
        return evaluate(run, state)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "evaluate", dies)
        with pytest.raises(Killed):
            tiny_run.train(tmp_path, straight[0])
    assert [row["step"] for row in tiny_run.metrics(tmp_path)] == [0, 1, 2, 3]
    found, said = tiny_run.train(tmp_path, straight[0])
    assert "resumed from step 2\n" in said
    assert found == straight[2]
    assert_same_run(tmp_path, straight)
    assert tiny_run.samples(tmp_path) == tiny_run.samples(straight[1])


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_the_run_goes_on(straight, tmp_path, monkeypatch, request, number):
    """The signal arrives while step 3 samples: that step is finished, written and saved, evaluation is not repeated."""
    verifying, calls = collect.verifying, []

    def interrupted(*given):
        calls.append(None)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return verifying(*given)

    before = signal.signal(number, signal.default_int_handler)  # under nohup SIGHUP is ignored, and stays so
    request.addfinalizer(lambda: signal.signal(number, before))
    with monkeypatch.context() as patch:
        patch.setattr(collect, "verifying", interrupted)
        with pytest.raises(Stopped, match="stopped after step 3") as stop:
            tiny_run.train(tmp_path, straight[0])
    assert stop.value.signal == number
    assert signal.getsignal(number) is signal.default_int_handler
    assert Checkpoints(tmp_path).latest == 3
    assert tiny_run.metrics(tmp_path)[-1]["step"] == 3
    assert "resumed from step 3" in tiny_run.train(tmp_path, straight[0])[1]
    assert_same_run(tmp_path, straight, extra=("eval/",))


def test_evaluation_never_replays(folder, tmp_path, monkeypatch):
    """A run that replays the rollout: training gives records to the router, no evaluation does."""
    choose, evaluate, replays, phase = Gate.choose, trainer.evaluate, {"training": [], "evaluation": []}, []

    def seen(gate, logits, weights, replay, *rest):
        replays[phase[-1] if phase else "training"].append(replay is not None)
        return choose(gate, logits, weights, replay, *rest)

    def evaluated(*args):
        phase.append("evaluation")
        found = evaluate(*args)
        phase.pop()
        return found

    monkeypatch.setattr(Gate, "choose", seen)
    monkeypatch.setattr(trainer, "evaluate", evaluated)
    # A model of its own: a program that another test has traced would not pass here again.
    changes = {"replay.mode": "R3", "model.rope_theta": 1e5, "warm_start.steps": 0, "steps": 1}
    tiny_run.train(tmp_path, tiny_run.make_config(folder, **changes))
    assert any(replays["training"])
    assert replays["evaluation"]
    assert not any(replays["evaluation"])


def test_another_router_of_the_sampler_is_evaluated_too(folder, monkeypatch):
    """An answer counts as right where its engine's router is noisy; an exact sampler has one evaluation."""
    monkeypatch.setattr(Engine, "prepare", lambda self, params: params)
    monkeypatch.setattr(Engine, "release", lambda self, prepared, params: None)
    monkeypatch.setattr(Engine, "generate", lambda self, *_: self)
    rewards = 16 * 3  # greedy and two samples
    judged = lambda out, *_: ([""] * rewards, {"verifier": np.full(rewards, out.router.noise)}, [])  # noqa: E731
    monkeypatch.setattr(pass_rate, "verify", judged)
    found = {}
    for noise in (0.0, 1.0):
        config = tiny_run.make_config(folder, **{"rollout.router_noise": noise})
        found[noise], _ = assembly.build(validate(config)).pass_rates(mock.Mock(TrainState))
    assert not any("sampler" in name for name in found[0.0])
    assert {name: found[1.0][f"eval/{name}"] for name in ("greedy", "sampler_greedy", "sampler_pass_at_1")} == {
        "greedy": 0,
        "sampler_greedy": 1,
        "sampler_pass_at_1": 1,
    }


def copy_of(straight, tmp_path):
    shutil.copytree(straight[1], tmp_path / "copy")
    return tmp_path / "copy"


def test_a_complete_run_stays_as_it_is(straight, tmp_path):
    workdir = copy_of(straight, tmp_path)
    before = tiny_run.metrics(workdir), tiny_run.samples(workdir)
    assert tiny_run.train(workdir, straight[0])[0] == straight[2]
    assert (tiny_run.metrics(workdir), tiny_run.samples(workdir)) == before


@pytest.mark.slow
def test_a_longer_run_goes_on_from_the_checkpoint(straight, tmp_path):
    """The number of steps is no part of what a run is."""
    workdir = copy_of(straight, tmp_path)
    longer = straight[0].copy_and_resolve_references()
    longer.steps = STEPS + 1
    tiny_run.train(workdir, longer)
    assert [row["step"] for row in tiny_run.metrics(workdir)] == list(range(STEPS + 2))


def test_a_checkpoint_of_another_config_is_refused(straight, tmp_path):
    other = straight[0].copy_and_resolve_references()
    other.seed = 1
    with pytest.raises(ValueError, match="holds the checkpoint of another config; use another --workdir"):
        tiny_run.train(copy_of(straight, tmp_path), other)


def test_a_checkpoint_on_another_base_is_refused(straight, tmp_path, monkeypatch):
    monkeypatch.setattr(saves, "base_digest", lambda state: "of another base")
    with pytest.raises(ValueError, match="is not the one that the checkpoint's adapters were trained on"):
        tiny_run.train(copy_of(straight, tmp_path), straight[0])


def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(straight, tmp_path):
    workdir = copy_of(straight, tmp_path)
    for path in (workdir / "checkpoints" / str(STEPS) / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    found, said = tiny_run.train(workdir, straight[0])
    assert re.search(rf"checkpoints/{STEPS} is damaged .*; going on from step 2\nresumed from step 2", said)
    assert found == straight[2]
    assert_same_run(workdir, straight)
    assert steps_of(workdir) == [2, STEPS]


@pytest.mark.slow
def test_a_checkpoint_that_is_due_while_one_is_written_comes_a_step_later(straight, tmp_path, monkeypatch):
    ready = iter([False, True])
    monkeypatch.setattr(Checkpoints, "ready", lambda self: next(ready))
    tiny_run.train(tmp_path / "run", straight[0])
    assert steps_of(tmp_path / "run") == [3, STEPS]
    assert_same_run(tmp_path / "run", straight)


def test_a_loss_that_is_not_finite_stops_the_run_with_its_step(straight, tmp_path, monkeypatch):
    """The row is written, for who looks for the reason; the checkpoint of the step is not."""
    judged, calls = collect.judged, []

    def poisoned(*given):
        found = judged(*given)
        calls.append(None)
        if len(calls) < 4:
            return found
        rewards = jnp.full_like(found.rollout.rewards, jnp.nan).at[::2].set(1.0)
        return dataclasses.replace(found, rollout=found.rollout.replace(rewards=rewards))

    monkeypatch.setattr(collect, "judged", poisoned)
    with pytest.raises(FloatingPointError, match=r"step 4, update 1 of \d: .*not finite"):
        tiny_run.train(tmp_path, straight[0])
    assert Checkpoints(tmp_path).latest == 2


def test_training_raises_the_reward(folder, tmp_path):
    """From a short warm start on sorting three digits, in the shapes of the runs above."""
    config = tiny_run.make_config(folder, steps=60, **{"checkpoint.every": 100, "log.diagnostics_every": 0})
    tiny_run.train(tmp_path, config)
    rows = tiny_run.metrics(tmp_path)
    assert not any("log/warnings" in row for row in rows)
    rewards = [row["reward/mean"] for row in rows[1:]]
    assert np.mean(rewards[-20:]) > np.mean(rewards[:20]) + 0.1, np.round(rewards, 2)


def test_what_is_doubtful_before_the_first_step_is_said_there(folder, tmp_path):
    """And known to the log, which names it in every row; such a run is refused only where it cannot but fail."""
    config = tiny_run.make_config(folder, **{"optimizer.learning_rate": 0.5, "rollout.max_new_tokens": 2})
    said = io.StringIO()
    with RunLog(tmp_path, 4, stream=said) as log:
        log.warn(doubts.of_run(assembly.build(validate(config))).doubts)
        log.metrics(0, {})
    warned = ["learning_rate", "answers_too_long"]
    assert re.findall(r"^warning (\w+): ", said.getvalue(), re.MULTILINE) == warned
    assert [row["log/warnings"] for row in tiny_run.metrics(tmp_path)] == [warned]


def test_what_cannot_but_fail_is_refused_before_the_first_step(folder, tmp_path):
    """Rates that are used, and right answers that no verifier rewards, where rewards are what a run learns from."""
    (tmp_path / "null.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": null}}\n' for n in range(40)))
    null = {"task.name": "jsonl", "task.options": {"path": f"{tmp_path}/null.jsonl"}, "model.vocab_size": None}

    def warnings(name="grpo", **changes):
        return doubts.of_run(assembly.build(validate(tiny_run.make_config(folder, name, **changes)))).doubts

    with pytest.raises(ValueError, match=r"warm_start\.learning_rate=1e\+09: .*nothing of the model is left"):
        warnings(**{"warm_start.learning_rate": 1e9, "critic.learning_rate": 1e9})
    separate = {"warm_start.steps": 0, "critic.kind": "separate"}
    with pytest.raises(ValueError, match=r"^critic\.learning_rate=1e\+09: "):
        warnings("ppo", **separate, **{"warm_start.learning_rate": 1e9, "critic.learning_rate": 1e9})
    with pytest.raises(
        ValueError, match="no answer can be rewarded: 40 of 40 right answers of jsonl are empty or null"
    ):
        warnings(**null)
    for other in (
        {"name": "sft", "rollout.group_size": 1},
        {"rewards.verifier_weight": 0.0, "rewards.length_weight": 1.0},
    ):
        assert warnings(**null, **other).keys() == {"answers_missing"}


@pytest.mark.slow
def test_four_devices_train_as_one(straight, folder, tmp_path):
    """Loss, gradients and routing of the first step, from the same parameters; then rounding may part the samples."""
    for shape in ((4, 1, 1, 1), (1, 1, 2, 2)):
        config = straight[0].copy_and_resolve_references()
        config.mesh.shape = shape
        config.steps = 1
        workdir = tmp_path / str(shape)
        tiny_run.train(workdir, config, start=tiny_run.start_of(straight[0]))
        one, four = tiny_run.metrics(straight[1])[1], tiny_run.metrics(workdir)[1]
        for name in one.keys() & four.keys():
            if name == "check/sampler_equal":  # counts what rounding changes
                continue
            if four[name] is None and one[name] is None:  # of no token
                continue
            np.testing.assert_allclose(four[name], one[name], rtol=2e-3, atol=1e-4, err_msg=f"{shape} {name}")


@pytest.mark.slow
def test_a_run_goes_on_from_its_nearer_checkpoint(straight, tmp_path):
    """Step 3's in DIR/local, where the one of step 4 is lost; it ends as the run without a break."""
    config = straight[0].copy_and_resolve_references()
    config.checkpoint.local_every = 3
    tiny_run.train(tmp_path, config)
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    assert "resumed from step 3" in tiny_run.train(tmp_path, config)[1]
    assert_same_run(tmp_path, straight)
