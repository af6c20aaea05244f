"""A reward model beside the policy: its scores however rows are cut, where it comes from, and whole runs with it."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground import sharding
from jaxrl_llm.objectives.rewards import KlController
from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.records.recorded import FORMAT
from jaxrl_llm.records.run_log import plain, write_json
from jaxrl_llm.run import assembly, run_dir
from jaxrl_llm.run.opening import opening
from jaxrl_llm.run.reward_model import RewardModel
from jaxrl_llm.run.settings import config_hash, validate
from jaxrl_llm.tasks import CharTokenizer
from jaxrl_llm.training import experience
from jaxrl_llm.training.state import parameter_axes
from tests.reference import tiny_reward_model, tiny_run
from tests.reference import tiny_training as tiny
from tests.reference.metrics_doc import documented

MODEL = tiny.make_model()
PARAMS = jax.device_get(tiny.draw_params(MODEL, value_head=True))
ROLLOUT = tiny.draw_trajectory()


def scores(updates=tiny.UPDATES, mesh=None):
    model = tiny.make_model(mesh)
    params = PARAMS
    if mesh is not None:
        params = jax.device_put(params, sharding.shardings(parameter_axes(model, params), params, model.mesh))
    judge = RewardModel("runs/rm", 1, "", model, params)
    return np.asarray(judge.score(ROLLOUT, updates))


def test_the_score_is_the_head_after_the_last_token_of_each_answer_alone():
    """Every row by itself, without padding, in the model's own forward; the head in float64."""
    head = {name: np.asarray(x, np.float64) for name, x in PARAMS["value_head"].items()}
    params, apply = jax.tree.map(jnp.asarray, PARAMS), jax.jit(MODEL.apply)
    for row, (tokens, length) in enumerate(zip(np.asarray(ROLLOUT.tokens), tiny.LENGTHS, strict=True)):
        if row in (0, 2, 3):  # cut off at its bound, without an answer, and an ordinary one
            alone = jnp.asarray(tokens[None, :length])
            hidden = apply(params, alone, segment_ids=jnp.ones_like(alone)).hidden[0, -1]
            expected = np.asarray(hidden, np.float64) @ head["kernel"] + head["bias"]
            np.testing.assert_allclose(scores()[row], expected, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"micro_batch_rows": 2}, {"minibatches": 2}, {"layout": "packed"}, {"layout": "packed", "micro_batch_rows": 4}],
    ids=str,
)
def test_no_cut_changes_a_score(changes):
    assert np.ptp(scores()) > 0.5
    np.testing.assert_allclose(scores(dataclasses.replace(tiny.UPDATES, **changes)), scores(), atol=2e-5)


@pytest.mark.parametrize("mesh", [(2, 2, 1, 1), pytest.param((1, 1, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_four_devices_give_the_same_scores(mesh):
    np.testing.assert_allclose(scores(mesh=mesh), scores(), atol=2e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data and warm starts of all runs, and the DIR of a reward model in rm/."""
    folder = tmp_path_factory.mktemp("shared")
    tiny_reward_model.write(folder / "rm", tiny_run.make_config(folder))
    return folder


RLHF = {
    "rewards.verifier_weight": 0.0,
    "rewards.reward_model_weight": 2.0,
    "rewards.length_weight": -0.25,
    "objective.reward_kl_coef": 0.1,
    "objective.kl_target": 0.5,
    "critic.warmup_steps": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 9,
}


def rlhf(folder, **changes):
    return tiny_run.make_config(folder, "ppo", **RLHF | {"rewards.reward_model": str(folder / "rm")} | changes)


def test_a_dir_is_read_as_it_was_written(folder):
    config = tiny_run.make_config(folder)
    judge = RewardModel.find(folder / "rm", validate(config).task.tokenizer)
    written = tiny_reward_model.write(folder / "again", config)
    jax.tree.map(np.testing.assert_array_equal, judge.load().params, written)
    assert judge.step == 7
    assert judge.params is None
    assert sharding.local_bytes(judge.shapes) == 4 * sum(x.size for x in jax.tree.leaves(written))


@pytest.mark.slow
def test_what_is_no_reward_model_of_this_policy(folder, tmp_path):
    config = tiny_run.make_config(folder)
    tokenizer = validate(config).task.tokenizer
    with pytest.raises(FileNotFoundError, match="nothing holds no run"):
        RewardModel.find(tmp_path / "nothing", tokenizer)
    with pytest.raises(
        ValueError, match="reads the 13 tokens of another tokenizer than the policy, which has 3; train"
    ):
        RewardModel.find(folder / "rm", CharTokenizer("0"))
    for changes, message in (
        ({"objective.name": "grpo"}, "holds a run of 'grpo'; give the DIR of a run of configs/reward_model.py"),
        ({"lora.rank": 2}, "was trained with lora.rank=2, but a reward model is read whole"),
    ):
        tiny_reward_model.write(tmp_path / str(changes), config, **changes)
        with pytest.raises(ValueError, match=message):
            RewardModel.find(tmp_path / str(changes), tokenizer)
    tiny_reward_model.write(tmp_path / "damaged", config)
    payload = tmp_path / "damaged" / "checkpoints" / "7" / "payload" / "metadata"
    saved = json.loads(payload.read_text())
    saved["digests"][".params['value_head']['bias']"] = "float32() 0000000000000001"
    payload.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"damaged.checkpoints.7 cannot be read .its payload differs from its digest"):
        RewardModel.find(tmp_path / "damaged", tokenizer).load()


@pytest.mark.slow
def test_a_run_is_identified_by_what_the_reward_model_is(folder, tmp_path):
    """Not by where it lies; one that was trained further is another one."""
    config = rlhf(folder)
    tiny_reward_model.write(tmp_path / "moved", tiny_run.make_config(folder))
    assert config_hash(rlhf(folder, **{"rewards.reward_model": str(tmp_path / "moved")})) == config_hash(config)
    tiny_reward_model.write(tmp_path / "other", tiny_run.make_config(folder), seed=4)
    assert config_hash(rlhf(folder, **{"rewards.reward_model": str(tmp_path / "other")})) != config_hash(config)
    workdir, used = tmp_path / "run", RewardModel.find(folder / "rm", validate(config).task.tokenizer)
    workdir.mkdir()
    (workdir / "metrics.jsonl").write_text('{"step": 1}\n')
    recorded = {
        "format": FORMAT,
        "config": plain(config.to_dict()),
        "config_hash": "another",
        **assembly.build(validate(config)).made_from,
    }
    assert recorded["reward_model"] == {"path": str(folder / "rm"), "step": 7, "digest": used.digest}
    write_json(workdir / "config.json", recorded)
    tiny_reward_model.write(tmp_path / "further", tiny_run.make_config(folder), step=8)
    with pytest.raises(ValueError, match=r"another config \(rewards.reward_model: \[7, '\w+'\] -> \[8, '\w+'\]\)"):
        run_dir.check(workdir, rlhf(folder, **{"rewards.reward_model": str(tmp_path / "further")}))
    with pytest.raises(FileNotFoundError, match=r"rewards.reward_model=gone: .*; train one: python -m jaxrl_llm.main"):
        config_hash(rlhf(folder, **{"rewards.reward_model": "gone"}))


@pytest.fixture(scope="module")
def coefficients():
    """Of the KL inside the reward, those that the advantages of `straight` were made with."""
    return []


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory, coefficients):
    """(config, DIR, last evaluation, what was said) of PPO with a reward model, steered KL and critic warm-up."""
    workdir, config, advantages = tmp_path_factory.mktemp("straight"), rlhf(folder), experience._advantages

    def watched(*arguments):
        coefficients.append(arguments[-1])
        return advantages(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experience, "_advantages", watched)
        return config, workdir, *tiny_run.train(workdir, config)


def test_what_a_run_logs(straight):
    config, workdir, *_ = straight
    rows = tiny_run.metrics(workdir)[1:]
    assert {key for row in rows for key in row} - {"step"} <= documented(), "add them to docs/metrics.md"
    shown = opening(assembly.build(validate(config)), workdir)
    assert f"-0.25 length + 2 reward_model ({config.rewards.reward_model})" in " ".join(shown.split())
    centre = rows[0]["reward/reward_model_centre"]
    assert all(row["reward/reward_model_centre"] == centre for row in rows)
    assert abs(centre) > 0.01
    assert rows[0]["reward/reward_model"] == pytest.approx(0, abs=1e-5)
    assert abs(rows[-1]["reward/reward_model"]) > 1e-4
    for row in rows:
        assert row["reward/verifier"] == pytest.approx(row["reward/mean"])  # asked, and not summed
        assert row["reward/reward_model_weighted"] == pytest.approx(2 * row["reward/reward_model"], abs=1e-6)
        assert row["reward/length_weighted"] == pytest.approx(-0.25 * row["rollout/length_mean"], rel=1e-5)
        parts = row["reward/reward_model_weighted"] + row["reward/length_weighted"]
        assert row["reward/total"] == pytest.approx(parts, rel=1e-5)
        assert "reward/verifier_weighted" not in row


def test_the_coefficient_follows_the_controller(straight, coefficients):
    """Step by step from the logged KL, which is 0 as long as the policy is its start: 1 % of 20 % less a step."""
    rows, controller = tiny_run.metrics(straight[1])[1:], KlController(0.1, target=0.5)
    assert [row["kl/reward_coef"] for row in rows[:3]] == pytest.approx([0.1, 0.098, 0.09604])
    assert [row["kl/reward_coef"] for row in rows] == pytest.approx([float(x) for x in coefficients])
    for row, after in itertools.pairwise(rows):
        assert after["kl/reward_coef"] == controller.next(row["kl/reward_coef"], row["kl/ref_answer"])
    assert rows[0]["kl/ref_answer"] == rows[1]["kl/ref_answer"] == 0  # the critic warms up
    assert rows[2]["kl/ref_answer"] != 0


def test_warm_up_leaves_the_policy_as_it_is(straight):
    """Bit for bit in the first rollout, in which the value head on it learns; then both."""
    config, workdir, *_ = straight
    run = assembly.build(validate(config))
    start = run.start(print).trained.policy
    one, two = (Checkpoints(workdir).restore(run.blank().saved(), step)[1].params for step in (1, 2))
    head = one["value_head"]
    assert np.abs(head["kernel"]).max() > 0
    jax.tree.map(np.testing.assert_array_equal, one | {"value_head": start["value_head"]}, start)
    assert all(np.abs(a - b).max() > 0 for a, b in zip(jax.tree.leaves(two), jax.tree.leaves(one), strict=True))


@pytest.mark.slow
def test_it_resumes_bit_for_bit(straight, tmp_path):
    """Between warm-up and training, with a coefficient and a centre that only the checkpoint knows."""
    tiny_run.assert_resumes_as(straight, tmp_path)


def test_a_dir_is_read_without_its_reward_model(straight):
    """Only training asks for it."""
    config, workdir, *_ = straight
    gone = config.copy_and_resolve_references()
    gone.rewards.reward_model = "gone"
    assert tiny_run.final_state(workdir, gone)[0] == 4
