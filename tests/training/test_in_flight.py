"""Rollouts asked ahead of their step: of an engine in another process, which answers while the devices train."""

import dataclasses
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground.metrics import finalize
from jaxrl_llm.rollout.rollout import Routes
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.gaps import ages, sampler_against_old
from jaxrl_llm.training.in_flight import StreamAhead, as_arrays, as_rollout
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.reward_sources import RolloutStream
from jaxrl_llm.training.rollouts_ahead import RolloutsAhead
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny
from tests.training import test_collect as scripted

LAG, PROMPTS = 2, scripted.PROMPTS
HOW = (tiny.make_model(), Sampling(), scripted.GROUP, scripted.BOUND, (1,))
ANSWERS = (scripted.MIXED,) * 24


@dataclasses.dataclass(frozen=True)
class Remote(scripted.Script):
    """Every token is of the policy that the engine was given last when its answers were written down."""

    remote = True
    taken: list[int] = dataclasses.field(default_factory=list)
    threads: set[str] = dataclasses.field(default_factory=set)
    keys: list[list[int]] = dataclasses.field(default_factory=list)  # of each rollout

    def take_weights(self, params, version):
        self.taken.append(version)
        return version, {"rollout/parameters_moved_bytes": 1.0}

    def generate(self, prepared, prompts, lengths, uids, key, limits=None):
        self.threads.add(threading.current_thread().name)
        self.keys.append(jax.random.key_data(key).tolist())
        if uids[0] == 4 * PROMPTS:
            raise ValueError("no server is left")
        out = super().generate(prepared, prompts, lengths, uids, key)
        return out.replace(versions=jnp.full(out.tokens.shape, self.taken[-1], jnp.int32))


@pytest.fixture
def source():
    engine = Remote(*HOW, answers=ANSWERS)
    learner = Learner(engine.model, objectives.make("grpo"), optax.sgd(1.0))
    scorer = Scorer(learner, ReplayConfig(), scripted.GROUP)
    fixed = (scripted.TASK, None, 0, PROMPTS, tiny.UPDATES, scripted.OFF, scripted.PLAIN)
    return RolloutsAhead(engine, scorer, *fixed, lag=LAG)


def take(source, stream, steps):
    """The rollouts of some steps, as (prompts, ages, what is said of the time)."""
    state = make_state(source.engine.model, {}, source.scorer.learner.optimizer)
    for step in steps:
        draw, seconds, waited = source.asked(stream, step, state)
        found = draw.rollout
        age = step - 1 - np.asarray(found.versions)[np.asarray(found.loss_mask)]
        yield found.sampler_logprobs[::2, 2].astype(int).tolist(), age, seconds, waited


def test_a_remote_engine_answers_in_a_thread_at_most_the_lag_behind(source):
    """Weights every step, prompts in their order, and no token is older than the lag."""
    stream, engine = StreamAhead(scripted.Prompts()), source.engine
    for step, (prompts, age, seconds, waited) in enumerate(take(source, stream, (1, 2)), start=1):
        assert prompts == [-1 - uid for uid in range((step - 1) * PROMPTS, step * PROMPTS)]
        assert engine.taken == list(range(step))
        assert 0 <= age.min() <= age.max() <= min(step - 1, LAG)
        assert seconds > 0
        assert waited.keys() == {"time/trainer_waited_s"} | ({"time/engine_waited_s"} if step > 1 else set())
        assert min(waited.values()) >= 0
        assert len(stream.asked) == LAG
    assert {name.rpartition("_")[0] for name in engine.threads} == {"rollouts"}


def test_a_remote_engine_is_asked_for_nothing_after_the_last_step(source):
    """Or the process would stay until it is answered; weights for the last evaluation go to it all the same."""
    source = dataclasses.replace(source, last=3)
    stream = StreamAhead(scripted.Prompts())
    assert len([*take(source, stream, (1, 2, 3))]) == len(source.engine.keys) == 3
    assert not stream.asked
    assert source.engine.taken == [0, 1, 2]


@dataclasses.dataclass(frozen=True)
class Local(Remote):
    """The same as the engine on the trainer's devices, which says no versions."""

    remote = False

    def take_weights(self, params, version=0):
        super().take_weights(params, version)
        return params, {}

    def generate(self, prepared, prompts, lengths, uids, key, limits=None):
        return super().generate(prepared, prompts, lengths, uids, key).replace(versions=None)


@dataclasses.dataclass(frozen=True)
class Shared(Remote):
    """The same for several processes, each of which asks for its share."""

    def asked(self, *given):
        return self.generate(*given)

    def gathered(self, answers):
        return answers


@pytest.mark.parametrize("kind", [Remote, Local, Shared])
def test_every_rollout_has_the_key_of_its_own_step_and_the_policy_that_was_there(source, monkeypatch, kind):
    """Step 1 asks for the rollouts of steps 1 to 3 of the policy after 0 steps, step 2 for the fourth of its own."""
    source = dataclasses.replace(source, engine=kind(*HOW, answers=ANSWERS))
    stream, state = StreamAhead(scripted.Prompts()), make_state(source.engine.model, {}, optax.sgd(1.0))
    with monkeypatch.context() as several:
        if kind is Shared:
            several.setattr(jax, "process_count", lambda: 2)
        held = [source.asked(stream, step, state)[0] for step in (1, 2)]
        while stream.asked:
            held.append(stream.take()[0])
    expected = [jax.random.fold_in(jax.random.key(source.seed), step) for step in (1, 2, 3, 4)]
    assert source.engine.keys == [jax.random.key_data(key).tolist() for key in expected]
    assert kind is Local or source.engine.taken == [0, 1]
    versions = [set(np.asarray(draw.rollout.versions).ravel().tolist()) for draw in held]
    assert versions[3] == {1}
    assert versions[:3] == [{0}] * 3 or kind is not Local  # a thread may find newer weights


def test_what_a_remote_engine_was_asked_is_asked_again(source):
    """Two steps, a kill with two rollouts in flight, one step more: each prompt is learned from once."""
    stream, again = StreamAhead(scripted.Prompts()), StreamAhead(scripted.Prompts())
    before = [prompts for prompts, *_ in take(source, stream, (1,))]
    assert source.in_flight(stream) == []
    source.resume(again, stream.get_state())
    assert not again.asked
    after = [prompts for prompts, *_ in take(source, again, (2,))]
    assert [*itertools.chain(*before, *after)] == [-1 - uid for uid in range(2 * PROMPTS)]


def test_a_failure_of_the_thread_is_that_of_the_step_that_waits_for_it(source):
    steps = take(source, StreamAhead(scripted.Prompts()), range(1, 9))
    assert len([next(steps) for _ in range(4)]) == 4
    with pytest.raises(ValueError, match="no server is left"):
        next(steps)


def test_without_a_lag_a_rollout_is_of_this_step_and_says_nothing_of_age(source):
    """The trees that programs see are those without these fields."""
    source = dataclasses.replace(source.without_lag(), engine=scripted.Script(*HOW, answers=ANSWERS))
    stream, state = RolloutStream(scripted.Prompts()), make_state(source.engine.model, {}, optax.sgd(1.0))
    draw, seconds, waited = source.asked(stream, 1, state)
    assert (stream.prompts.batches, waited, draw.rollout.versions) == (1, {}, None)
    assert seconds > 0
    assert source.in_flight(stream) == []


def test_a_rollout_is_its_arrays():
    t = scripted.scripted((scripted.MIXED,) * PROMPTS)
    for one in (t, t.replace(routes=Routes()), t.replace(versions=t.tokens)):
        arrays = as_arrays(one)
        assert all(isinstance(x, jax.Array) for x in arrays.values())
        again = as_rollout(arrays)
        assert jax.tree.structure(again) == jax.tree.structure(one)
        assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(one), strict=True))


def test_only_tokens_of_the_current_policy_say_how_far_the_sampler_is_from_it():
    """Staleness is no mismatch: the run-time check leaves older tokens out, and one without an age compares all."""
    batch = tiny.draw_batch()
    versions = jnp.where(jnp.arange(tiny.TIME) < 7, 2, 5)[None] * jnp.ones((tiny.ROWS, 1), jnp.int32)
    age, metrics = ages(versions, jnp.int32(5), batch.loss_mask)
    stale, mask = np.asarray(age) > 0, np.asarray(batch.loss_mask)
    assert set(np.asarray(age)[mask]) == {0.0, 3.0}
    assert finalize(metrics) == pytest.approx({"rollout/age_mean": 3 * stale[mask].mean(), "rollout/age_max": 3})
    moved = batch.sampler_logprobs + jnp.where(stale, 1.0, 0.001)
    for one, expected in ((batch.replace(age=age), 0.001), (batch, np.where(stale, 1, 0.001)[mask].mean())):
        found = finalize(sampler_against_old(one, moved, None))
        assert found["check/old_sampler_mean"] == pytest.approx(expected, rel=1e-3)
