"""Runs with a lag: equal to a loop that keeps every policy, resumed bit for bit, with ages in their metrics."""

import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.check.fits import stays_of
from jaxrl_llm.ground import sharding
from jaxrl_llm.plan.programs import programs
from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.rollout.rollout import Routes
from jaxrl_llm.rollout.verification import verify
from jaxrl_llm.run import assembly
from jaxrl_llm.run.settings import validate
from jaxrl_llm.training.layout import epochs_of
from tests.reference import tiny_run

STEPS, LAG = 4, 2
# On several devices, in packed rows, corrected by the policy that sampled; two updates a rollout.
SETTING = {
    "rollout.lag": LAG,
    "mesh.shape": (2, 1, 1, 1),
    "updates.layout": "packed",
    "updates.micro_batch_rows": 4,
    "objective.correction": "tis",
    "optimizer.learning_rate": 3e-3,
    "checkpoint.every": 2,
    "log.diagnostics_every": 0,
    "warm_start.steps": 0,
    "rewards.length_weight": 0.1,
    "rollout.prompts": 4,
    "rollout.group_size": 4,
    "steps": STEPS,
}


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
    """(config, DIR, last evaluation) of a run with a lag."""
    workdir, config = tmp_path_factory.mktemp("straight"), tiny_run.make_config(folder, **SETTING)
    return config, workdir, tiny_run.train(workdir, config)[0]


def by_hand(run, lag):
    """The policy after every step, and of every step the mean reward and the weights of the correction."""
    s, learner, engine = run.settings, run.learner, run.source.engine
    state, stream = run.start(print), run.source.stream().prompts
    policies, found = [state.policy.copy()], []
    for step in range(1, s.steps + 1):
        sampler = policies[max(0, step - 1 - lag)]
        batch, key = next(stream), jax.random.fold_in(jax.random.key(s.seed), step)
        out = engine.generate(sampler.trained, batch["tokens"], batch["lengths"], batch["draw"].astype(np.uint32), key)
        lengths = np.asarray(out.loss_mask).sum(1)
        rewards = verify(out, s.task, batch, s.rollout.group_size)[1]["verifier"] + np.float32(0.1) * lengths
        epochs = epochs_of(
            *jax.device_get((out.segment_ids, out.loss_mask)),
            s.rollout.group_size,
            s.answer_length,
            s.updates,
            seed=s.seed,
            step=step,
        )
        old = learner.score(policies[-1], out, epochs[0], {"logprobs", "routing"})["logprobs"]
        advantages = objectives.group_advantages(jnp.asarray(rewards), group_size=s.rollout.group_size)
        learned = out.replace(advantages=jnp.where(out.loss_mask, advantages[:, None], 0), old_logprobs=old)
        learned = learned.replace(routes=Routes())
        for layout in epochs[0]:
            state, _ = learner.update(state, learned, layout)
        policies.append(state.policy.copy())
        mask = np.asarray(out.loss_mask)
        weights = np.minimum(np.exp(np.asarray(old - out.sampler_logprobs)), 2.0)[mask]
        found.append(
            {"reward/total": rewards.mean(), "mismatch/weight": weights.mean(), "rollout/length_mean": lengths.mean()}
        )
    return policies, found


def assert_close(params, others):
    """To rounding: the loop by hand is another program."""
    for a, b in zip(*map(jax.tree.leaves, (params, jax.device_get(others))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_lag_is_a_loop_that_keeps_old_policies(straight):
    """Prompts and keys of the step, answers of the policy two steps before, scored and corrected by the current one."""
    config, workdir, _ = straight
    run = assembly.build(validate(config))
    policies, found = by_hand(run, LAG)
    trained = tiny_run.final_state(workdir, config)[1].params
    assert_close(trained, policies[-1].trained)
    rows = tiny_run.metrics(workdir)[1:]
    for name in found[0]:
        np.testing.assert_allclose([row[name] for row in rows], [one[name] for one in found], rtol=1e-4, err_msg=name)
    assert abs(found[-1]["mismatch/weight"] - 1) > 1e-3  # at age 2 there is something to correct


@pytest.mark.slow
def test_without_a_lag_the_loop_has_the_policy_of_the_step(folder, tmp_path):
    config = tiny_run.make_config(folder, **SETTING | {"rollout.lag": 0})
    tiny_run.train(tmp_path, config)
    policies, _ = by_hand(assembly.build(validate(config)), 0)
    assert_close(tiny_run.final_state(tmp_path, config)[1].params, policies[-1].trained)
    assert not any(name.startswith("rollout/age") for row in tiny_run.metrics(tmp_path) for name in row)


@pytest.mark.slow
def test_memory_counts_what_is_in_flight(straight):
    run = assembly.build(validate(straight[0]))
    by_rows = functools.partial(sharding.rollout_sharding, mesh=run.model.mesh)
    held = sharding.local_bytes(
        Checkpoints(straight[1]).restore(run.blank().saved(), in_flight=by_rows)[2]["in_flight"]
    )
    assert stays_of(run, programs(run, ["rollout"]))["in flight"] == pytest.approx(held, rel=0.01)


def test_the_age_rises_to_the_lag_and_only_tokens_of_age_0_are_checked(straight):
    rows = tiny_run.metrics(straight[1])[1:]
    assert [row["rollout/age_mean"] for row in rows] == [row["rollout/age_max"] for row in rows] == [0, 1, 2, 2]
    assert [row["check/old_sampler_mean"] is None for row in rows] == [False, True, True, True]
    assert rows[0]["mismatch/mean"] == rows[0]["check/old_sampler_mean"] < 1e-4 < rows[2]["mismatch/mean"]
    assert all(row["check/current_old_mean"] < 1e-4 for row in rows)


def test_a_run_with_rollouts_in_flight_resumes_bit_for_bit(straight, tmp_path):
    """From the checkpoint of step 2, because of the last one a rollout in flight is damaged; its state can be read."""
    config, whole, evaluation = straight
    workdir = tmp_path / "copy"
    shutil.copytree(whole, workdir)
    for path in (workdir / "checkpoints" / str(STEPS) / "in_flight").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    assert tiny_run.final_state(workdir, config)[0] == STEPS
    found, said = tiny_run.train(workdir, config)
    assert re.search(rf"checkpoints/{STEPS} is damaged .*; going on from step 2\nresumed from step 2", said)
    assert found == evaluation
    (_, ours), (_, theirs) = (tiny_run.final_state(place, config) for place in (workdir, whole))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert tiny_run.metrics(workdir) == tiny_run.metrics(whole)


KINDS = {
    "R3, one device": ("gspo", {"replay.mode": "R3", "rollout.lag": 1}),
    "adapters, rollouts on another mesh": (
        "grpo",
        {"lora.rank": 2, "mesh.shape": (1, 2, 1, 1), "rollout.mesh_shape": (2, 1, 1, 1), "rollout.lag": 3},
    ),
    "one update, long answers filtered": (
        "sapo",
        {"updates.minibatches": 1, "rewards.overlong_filter": True, "rollout.max_new_tokens": 3, "rollout.lag": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_resume_too(folder, tmp_path, kind):
    """Ended after step 1 with rollouts in flight, and gone on to 3."""
    name, changes = KINDS[kind]
    tiny_run.assert_parts_are_the_whole(tmp_path, lambda **more: tiny_run.make_config(folder, name, **changes, **more))
    rows = tiny_run.metrics(tmp_path / "parts")[1:]
    assert [row["rollout/age_max"] for row in rows] == [min(i, changes["rollout.lag"]) for i in range(3)]
