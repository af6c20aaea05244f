"""Runs that train adapters: they start as the run of all parameters does, keep nothing but adapters, and resume."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.evaluation import main as evaluate
from jaxrl_llm.models.lora import merge
from jaxrl_llm.records.recorded import FORMAT
from jaxrl_llm.records.run_log import RunLog
from jaxrl_llm.run import assembly, reopened
from jaxrl_llm.run.opening import opening
from jaxrl_llm.run.settings import config_hash, validate
from tests.reference import tiny_run

pytestmark = pytest.mark.slow  # whole runs; tests/models/test_lora.py has their parts

LORA = {"lora.rank": 2, "objective.kl_coef": 0.01, "checkpoint.every": 2, "log.diagnostics_every": 2, "steps": 4}


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
    """(config, DIR, last evaluation, what was said) of a run from the first step to the last."""
    workdir, config = tmp_path_factory.mktemp("straight"), tiny_run.make_config(folder, **LORA)
    with RunLog(workdir, config.steps) as log:
        log.write_config({"format": FORMAT, "config": config.to_dict(), "config_hash": config_hash(config)})
    return config, workdir, *tiny_run.train(workdir, config)


def state_bytes(workdir, step):
    """Bytes on the disk of a checkpoint's arrays; Orbax's index of them adds some ten thousand that vary."""
    return sum(path.stat().st_size for path in (workdir / "checkpoints" / str(step) / "state").rglob("d/*"))


def leaves_kept(workdir, step):
    """The names of the arrays that a checkpoint holds."""
    return (workdir / "checkpoints" / str(step) / "state" / "_METADATA").read_text()


def test_the_first_rollout_is_that_of_all_parameters(straight, folder, tmp_path):
    """B = 0: the same answers, and the ratio of the first update is 1. Of three states, one file of the reference."""
    config = tiny_run.make_config(folder, **LORA | {"lora.rank": 0, "steps": 1})
    tiny_run.train(tmp_path, config)
    ours, theirs = (tiny_run.metrics(workdir) for workdir in (straight[1], tmp_path))
    same = [name for name in theirs[1] if name.startswith(("reward/", "rollout/", "kl/sampler", "check/old_sampler"))]
    for name in same:
        np.testing.assert_allclose(ours[1][name], theirs[1][name], rtol=1e-5, atol=1e-9, err_msg=name)
    answers = [[row for row in tiny_run.samples(workdir) if row["step"] <= 1] for workdir in (straight[1], tmp_path)]
    assert [row for row in answers[0] if row["step"] == 0] == [row for row in answers[1] if row["step"] == 0]
    assert [row for row in answers[0] if "split" not in row] == [row for row in answers[1] if "split" not in row]
    assert all(row["check/current_old_mean"] < 1e-6 for row in ours[1:])
    assert all(0 < row["kl/ref"] < 0.1 for row in ours[1:])
    assert "routing/share_of_variance" in ours[2]

    model = assembly.build(validate(config)).model
    base = 4 * sum(x.size for x in jax.tree.leaves(model.shapes()))
    assert (tmp_path / "reference").is_dir()
    assert not (straight[1] / "reference").exists()
    assert state_bytes(tmp_path, 1) > 2.5 * base  # parameters and two moments of random bits
    adapters = assembly.build(validate(straight[0])).blank()
    own = sum(x.nbytes for x in jax.tree.leaves(adapters))
    assert own < base
    assert state_bytes(straight[1], 4) < state_bytes(tmp_path, 1) - base
    assert "embedding" in leaves_kept(tmp_path, 1)
    assert "embedding" not in leaves_kept(straight[1], 4)


def test_the_opening_says_how_much_is_trained(straight):
    config, workdir, *_ = straight
    run = assembly.build(validate(config))
    count = sum(x.size for x in jax.tree.leaves(run.blank().trained.policy))
    shown = opening(run, workdir)
    assert f"trained    {count / 1000:.3g} k parameters: LoRA of rank 2, alpha 16, on attention,mlp" in shown


@pytest.mark.slow
def test_it_resumes_bit_for_bit(straight, tmp_path):
    tiny_run.assert_resumes_as(straight, tmp_path)


def test_another_base_is_refused(straight, tmp_path):
    config, workdir, *_ = straight
    base = assembly.build(validate(config)).start(print).base
    other = jax.tree.map(lambda x: x, base)
    other["ends"]["norm"]["scale"] = other["ends"]["norm"]["scale"].at[3].add(1e-3)
    before = tiny_run.metrics(workdir)
    with pytest.raises(ValueError, match=r"the frozen base of this run is not the one .*warm_start\.cache_dir"):
        tiny_run.train(workdir, config, start=other)
    assert tiny_run.metrics(workdir) == before


@pytest.mark.slow
def test_the_policy_of_a_dir_is_merged(straight, capsys):
    workdir = straight[1]
    run, step, state = reopened.restored(workdir)
    assert step == 4
    params = state.policy.plain(run.model)
    expected = merge(state.base, state.trained.policy, 16 / 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), params, expected)
    same, its = (x["ends"]["embedding"].unsafe_buffer_pointer() for x in (params, state.base))
    assert same == its  # no copy of what is no target
    assert jnp.abs(params["moe"]["mlp"]["up"] - state.base["moe"]["mlp"]["up"]).max() > 1e-4
    assert evaluate(["--workdir", str(workdir), "--prompts", "4", "--samples", "2"]) == 0
    assert "4 test prompts, step 4 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora.rank": -1}, "lora.rank=-1 must be at least 0; 0 trains every parameter"),
        ({"lora.rank": 2, "lora.targets": "attention,mpl"}, "lora.targets='mpl' is unknown .did you mean 'mlp'.?"),
        ({"lora.rank": 2, "lora.targets": "router", "model.num_experts": 0}, "lora.targets='router' name no matrix"),
    ],
)
def test_bad_fields(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        validate(tiny_run.make_config(folder, **changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("ppo", {"critic.kind": "head"}, id="value head"),
        pytest.param("ppo", {"critic.kind": "separate", "objective.reward_kl_coef": 0.01}, id="separate critic"),
        pytest.param(
            "gspo",
            {"replay.mode": "R3", "updates.layout": "packed", "mesh.shape": (1, 2, 2, 1)},
            id="R3 packed, fsdp and expert",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "grpo",
            {"replay.mode": "R2", "replay.what": "logits", "updates.epochs": 2, "mesh.shape": (2, 1, 1, 2)},
            id="R2 logits, data and tensor",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "dapo",
            {"dynamic_sampling.max_draws": 2, "updates.length_buckets": 2, "model.param_dtype": "bfloat16"},
            id="DAPO, bfloat16",
        ),
    ],
)
def test_other_kinds_of_run_resume_too(folder, tmp_path, name, changes):
    """Interrupted by its number of steps after 1, gone on to 3, and the same as the run without a break."""
    own = {"lora.rank": 2, "lora.targets": "attention,mlp,router"} | changes
    tiny_run.assert_parts_are_the_whole(tmp_path, functools.partial(tiny_run.make_config, folder, name, **own))


@pytest.mark.slow
def test_adapters_raise_the_reward(folder, tmp_path):
    """From a short warm start on sorting three digits: rank 4 on every matrix but the router's."""
    changes = {"lora.rank": 4, "optimizer.learning_rate": 5e-3, "checkpoint.every": 100, "log.diagnostics_every": 0}
    tiny_run.train(tmp_path, tiny_run.make_config(folder, steps=100, **changes))
    rewards = [row["reward/mean"] for row in tiny_run.metrics(tmp_path)[1:]]
    assert np.mean(rewards[-20:]) > np.mean(rewards[:20]) + 0.15, np.round(rewards, 2)
